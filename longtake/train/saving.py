"""Checkpoints of a run: which moment is written, what goes into it, how many stay."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from longtake import __version__
from longtake.checkpoint import retain, save_checkpoint
from longtake.parallel import World
from longtake.train.clock import Clock


class Saver:
    """Writes each moment at most once."""

    def __init__(self, folder: Path, world: World, facts: Mapping[str, object], keep_n_latest: int) -> None:
        self.folder, self.world, self.facts, self.keep = folder, world, dict(facts), keep_n_latest
        self.last: Path | None = None
        self._last_step: int | None = None

    def started_from(self, path: Path, clock: Clock) -> None:
        """The run continues `path`: that moment needs no second checkpoint."""
        self.last, self._last_step = path, clock.global_step

    def save(
        self, clock: Clock, position: dict | None, tensors: Mapping[str, Tensor], samples: Mapping[str, int]
    ) -> None:
        """Collective. Writes `epoch{E}-global_step{N}` with its COMPLETE marker, then deletes what is too old.

        `samples`: how many were tried and lost so far.
        """
        if clock.global_step == self._last_step:
            return
        state = {
            **self.facts,
            "clock": clock.to_json(),
            "data": position,
            "samples": dict(samples),
            "versions": {
                "longtake": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        }
        self.last = save_checkpoint(self.folder, clock.pass_index, clock.global_step, tensors, state)
        self._last_step = clock.global_step
        if self.world.is_main:
            retain(self.folder, self.keep)
        self.world.barrier()
