"""Python's garbage collector, run by hand.

By itself it runs whenever enough objects were made, on each rank at another moment; each time all other ranks wait in
their next collective for the one that collects.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class GarbageClock:
    """Says in which steps garbage is collected: the same ones on every rank."""

    every: int  # steps; 0: Python decides

    def tick(self, step: int) -> None:
        """After step number `step`: collects if it is one of them."""
        if self.every and step % self.every == 0:
            gc.collect()


@contextmanager
def collected_by_hand(every: int) -> Iterator[GarbageClock]:
    """Stops the collector in the body, where only the clock's `tick` runs it; `every` = 0 leaves it as it is.

    What is there at the start, such as modules and the model, is set aside and not gone through each time. At the end,
    also by an error, the collector is as it was before.
    """
    if not every:
        yield GarbageClock(0)
        return
    enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield GarbageClock(every)
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()
