"""What makes batches of slots without any video, for tests of everything behind it."""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np
import torch

from longtake.contracts import Batch, Bucket, ClipFault, Slot

Before = Callable[[Slot, int], None]  # called with the slot and a sample id before that sample is "loaded"


class Names:
    """A table that knows paths only."""

    def written_path(self, row: int) -> str:
        return f"clips/{row}.mp4"


def nothing(slot: Slot, sample: int) -> None:
    """Loads without incident."""


@dataclass
class Numbers:
    """Pixels that follow from the sample id; `before` may sleep, raise or kill. An `OSError` in it is a bad clip."""

    before: Before = nothing
    table: Names = field(default_factory=Names)

    def batch_bytes(self, bucket: Bucket) -> int:
        return bucket.batch_size * 3 * int(np.prod(bucket.shape))

    def __getitem__(self, slot: Slot) -> Batch:
        weights, faults = slot.weights.copy(), []
        video = torch.zeros(len(slot.rows), 3, *slot.bucket.shape, dtype=torch.uint8)
        for place, sample in enumerate(slot.samples.tolist()):
            if not weights[place]:
                continue
            try:
                self.before(slot, sample)
            except OSError as error:
                weights[place] = 0
                faults.append(ClipFault(f"clips/{slot.rows[place]}.mp4", sample, slot.pass_index, str(error)))
                continue
            video[place] = torch.arange(video[place].numel()).add(sample).to(torch.uint8).view(video[place].shape)
        return Batch(
            bucket=slot.bucket,
            video=video,
            text=tuple(f"sample {sample}" for sample in slot.samples.tolist()),
            fps=torch.full((len(slot.rows),), 24.0),
            size=torch.ones(len(slot.rows), 2, dtype=torch.int64),
            keys=slot.keys,
            weights=torch.from_numpy(weights),
            draws={"mask": torch.rand(len(slot.rows), generator=torch.Generator().manual_seed(int(slot.samples[0])))},
            faults=tuple(faults),
        )


def slot_of(samples: Sequence[int], shape: tuple[int, int, int] = (2, 8, 8)) -> Slot:
    """A slot of the given sample ids, each of them its own row."""
    ids = np.asarray(samples, np.uint64)
    bucket = Bucket("8px", shape[0], "1:1", shape, len(samples))
    return Slot(bucket, 0, ids.astype(np.int64), ids, ids + np.uint64(1000), np.ones(len(samples), np.float32))


def slots_of(count: int, batch_size: int = 3) -> list[Slot]:
    """Slots over the samples 0, 1, 2 ..."""
    return [slot_of(range(first, first + batch_size)) for first in range(0, count * batch_size, batch_size)]


def same(a: Batch, b: Batch) -> bool:
    """Bitwise equality of everything."""
    for name in (found.name for found in fields(Batch)):
        x, y = getattr(a, name), getattr(b, name)
        if isinstance(x, dict):
            if x.keys() != y.keys() or not all(torch.equal(x[key], y[key]) for key in x):
                return False
        elif isinstance(x, torch.Tensor):
            if x.dtype != y.dtype or not torch.equal(x, y):
                return False
        elif not (np.array_equal(x, y) if isinstance(x, np.ndarray) else x == y):
            return False
    return True


def die(number: signal.Signals) -> None:
    """The end of this process, as a crash or the system would bring it about."""
    faulthandler.disable()  # its report would hide those of the tests
    os.kill(os.getpid(), number)


def once(folder: Path, act: Callable[[], None], at: int, times: int = 1) -> Before:
    """Does `act` the first `times` times that sample `at` is loaded, in whichever process."""

    def before(slot: Slot, sample: int) -> None:
        if sample != at:
            return
        for number in range(times):
            try:
                (folder / f"{at}-{number}").touch(exist_ok=False)
            except FileExistsError:
                continue
            act()
            return

    return before
