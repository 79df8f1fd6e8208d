"""Checkpoints of a run: which moment is written, what goes into it, how many stay."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from longtake import __version__
from longtake.checkpoint import BackgroundSaver, retain, save_checkpoint
from longtake.parallel import World
from longtake.train.clock import Clock

_LAST_SECONDS = 20.0  # that a save under way is given where the run ends by an error


class Saver:
    """Writes each moment at most once: in the background, or while the run waits (`async_io=False`)."""

    def __init__(
        self,
        folder: Path,
        world: World,
        facts: Mapping[str, object],
        keep_n_latest: int,
        keep_every: int | None = None,
        async_io: bool = False,
    ) -> None:
        self.folder, self.world, self.facts = folder, world, dict(facts)
        self.keep_n_latest, self.keep_every = keep_n_latest, keep_every
        self.last: Path | None = None
        self._last_step: int | None = None
        self._background = BackgroundSaver() if async_io else None

    @property
    def failed(self) -> bool:
        """Whether this rank could not write its part of the save under way; the next `save` or `wait` says why."""
        return self._background is not None and self._background.failed

    def started_from(self, path: Path, clock: Clock) -> None:
        """The run continues `path`: that moment needs no second checkpoint."""
        self.last, self._last_step = path, clock.global_step

    def save(
        self, clock: Clock, position: dict | None, tensors: Mapping[str, Tensor], facts: Mapping[str, object]
    ) -> None:
        """Collective. Writes `epoch{E}-global_step{N}` with its COMPLETE marker, then deletes what is too old.

        In the background, it returns once `tensors` are copied. `facts`: more of this moment for `run.json`.
        """
        if clock.global_step == self._last_step:
            return
        state = {
            **self.facts,
            **facts,
            "clock": clock.to_json(),
            "data": position,
            "versions": {
                "longtake": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        }
        moment = (self.folder, clock.pass_index, clock.global_step, tensors, state)
        if self._background is not None:
            self.last = self._background.save(*moment, then=self._retain)
        else:
            self.last = save_checkpoint(*moment)
            if self.world.is_main:
                self._retain()
            self.world.barrier()
        self._last_step = clock.global_step

    def wait(self) -> None:
        """Waits until the last save is complete. Collective."""
        if self._background is not None:
            self._background.wait()

    def close(self) -> None:
        """Gives a save under way a little time to come to its end, and ends the writer."""
        if self._background is not None:
            self._background.close(_LAST_SECONDS)

    def _retain(self) -> None:
        retain(self.folder, self.keep_n_latest, self.keep_every)
