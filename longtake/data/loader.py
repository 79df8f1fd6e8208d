"""Batches made ahead of time in worker processes, in the order of their slots."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch.utils.data import DataLoader

from longtake.contracts import Batch, Slot, UserError
from longtake.data.dataset import SlotDataset

_LAST_WORD_SECONDS = 1.0  # for a worker to end by itself after torch has told it to


class SlotLoader:
    """Worker processes that turn slots into batches; they stay alive, with their caches, from one `fetch` to the next.

    `num_workers`: 0 makes each batch in this process when it is asked for; `prefetch_factor`: slots made ahead by each
    worker (None: 2); `pin_memory`: tensors in page-locked memory, where a CUDA device is there.
    """

    def __init__(
        self, dataset: SlotDataset, num_workers: int = 0, prefetch_factor: int | None = None, pin_memory: bool = False
    ):
        self._slots = _Slots()
        self._pin = pin_memory and torch.cuda.is_available()
        self._loader = DataLoader(
            dataset,
            batch_size=None,
            sampler=self._slots,
            num_workers=num_workers,
            prefetch_factor=(prefetch_factor or 2) if num_workers else None,
            persistent_workers=num_workers > 0,
            collate_fn=_as_it_is,
            worker_init_fn=_start_worker,
            generator=torch.Generator(),  # the loader draws a seed from it; the default generator would be disturbed
        )

    def fetch(self, slots: Iterable[Slot]) -> Iterator[Batch]:
        """Batches of `slots` in their order, whatever the number of workers; the workers start at once.

        `slots` is read ahead by `num_workers * prefetch_factor`. A new `fetch` ends the one before it. A worker that
        dies ends the iteration with a `UserError` that says by what.
        """
        self._slots.now = slots
        with _named_death():
            batches = iter(self._loader)
        return self._batches(batches)

    def close(self) -> None:
        """Ends the worker processes; `fetch` starts new ones. Without it they stay until the loader is forgotten."""
        iterator, self._loader._iterator = self._loader._iterator, None
        if iterator is not None:
            iterator._shutdown_workers()  # terminates, but does not wait for, a worker that is slow to end
            for worker in getattr(iterator, "_workers", ()):
                worker.join(_LAST_WORD_SECONDS)
                if worker.is_alive():  # it ignores SIGTERM: a decoder that hangs
                    worker.kill()
                    worker.join()

    def _batches(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        while True:
            with _named_death():
                batch = next(batches, None)
            if batch is None:
                return
            yield _pinned(batch) if self._pin else batch


@contextmanager
def _named_death() -> Iterator[None]:
    """Turns torch's error about a dead worker into a `UserError`; our own errors pass."""
    try:
        yield
    except RuntimeError as error:
        if "DataLoader worker (pid" not in str(error):  # torch's words for a death
            raise
        raise UserError(
            f"a data worker died ({str(error).splitlines()[0].strip()}); if memory ran out, lower num_workers, "
            "prefetch_factor or dataset.cache_mb, else find the clip with `longtake data probe`"
        ) from error


class _Slots:
    """The loader's sampler: whatever the current fetch is given."""

    def __init__(self) -> None:
        self.now: Iterable[Slot] = ()

    def __iter__(self) -> Iterator[Slot]:
        return iter(self.now)


def _as_it_is(batch: Batch) -> Batch:
    return batch


def _start_worker(_: int) -> None:
    torch.set_num_threads(1)
    for number in (signal.SIGINT, signal.SIGTERM):  # both are for the trainer, which wants to save first
        signal.signal(number, signal.SIG_IGN)


def _pinned(batch: Batch) -> Batch:
    tensors = {name: getattr(batch, name).pin_memory() for name in ("video", "fps", "size", "weights")}
    return replace(batch, **tensors, draws={name: value.pin_memory() for name, value in batch.draws.items()})
