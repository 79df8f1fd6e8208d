"""Checkpoints of a run: which moment is written, what goes into it, how many stay."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from longtake.checkpoint.background import BackgroundSaver
from longtake.checkpoint.folder import checkpoint_path
from longtake.checkpoint.runs import retain, set_aside
from longtake.checkpoint.save import save_checkpoint, size_of
from longtake.checkpoint.state import RunState
from longtake.parallel.world import World
from longtake.train.adapter_files import AdapterFiles

_LAST_SECONDS = 20.0  # for a save in progress when the run ends with an error


@dataclass
class Saver:
    """Writes each moment at most once: in the background, or while the run waits (`async_io=False`)."""

    folder: Path
    world: World
    keep_n_latest: int
    keep_every: int | None
    async_io: bool
    say: Callable[[str], None]  # puts a line on rank 0's terminal
    beside: AdapterFiles | None = None  # files of each checkpoint beside the run's folder
    last: Path | None = None

    def __post_init__(self) -> None:
        self._last_step: int | None = None
        self._is_own = False  # the last one was written by this launch
        self._background = BackgroundSaver() if self.async_io else None

    def look_for_room(self, num_bytes: int) -> None:
        """Warn on rank 0 if the next checkpoint, of so many bytes, does not fit on the disk."""
        if self.world.is_main and (free := shutil.disk_usage(self.folder).free) < num_bytes:
            self.say(
                f"{self.folder}: {free / 1e9:.3g} GB are free there and the next checkpoint needs "
                f"{num_bytes / 1e9:.3g} GB; make room before it is due"
            )

    @property
    def failed(self) -> bool:
        """True if this rank could not write its part of the save in progress; the next `save` or `wait` raises the
        reason."""
        return self._background is not None and self._background.failed

    def started_from(self, path: Path, step: int) -> None:
        """Record that the run resumes from `path`, of that step: it needs no second checkpoint."""
        self.last, self._last_step = path, step
        if self.beside is not None and self.world.is_main:
            self.beside.write(path)

    def save(self, state: RunState, tensors: Mapping[str, Tensor]) -> None:
        """Delete what is too old, then write `epoch{E}-global_step{N}` with its COMPLETE marker. Collective.

        In the background, it returns once `tensors` are copied. Only checkpoints that a later step has confirmed count
        for `keep_n_latest`, so the newest one never displaces them.
        """
        clock = state.clock
        if clock.global_step == self._last_step:
            return
        self.wait()
        self.remove_old()
        moment = (self.folder, clock.pass_index, clock.global_step, tensors, state.to_json())
        num_bytes = size_of(tensors)
        target = checkpoint_path(self.folder, clock.pass_index, clock.global_step)
        if self._background is not None:
            self.last = self._background.save(*moment, then=lambda: self._completed(target, num_bytes))
        else:
            self.last = save_checkpoint(*moment)
            if self.world.is_main:
                self._completed(self.last, num_bytes)
            self.world.barrier()
        self._last_step, self._is_own = clock.global_step, True

    def remove_old(self) -> None:
        """Delete on rank 0 the checkpoints that `keep_n_latest` and `keep_every` do not retain."""
        if self.world.is_main:
            removed = retain(self.folder, self.keep_n_latest, self.keep_every)
            if self.beside is not None:
                self.beside.remove(removed)

    def set_aside(self, last_good_step: int) -> str:
        """Rename the checkpoint that this launch wrote after its last good step, and return its new name; empty where
        there is none. Collective."""
        if self._last_step != last_good_step or not self._is_own:
            return ""
        self.wait()
        return self.world.on_main(lambda: set_aside(self.last).name)

    def wait(self) -> None:
        """Wait until the last save is complete. Collective."""
        if self._background is not None:
            self._background.wait()

    def close(self) -> None:
        """Give a save in progress a little time to finish, and end the writer."""
        if self._background is not None:
            self._background.close(_LAST_SECONDS)

    def _completed(self, checkpoint: Path, num_bytes: int) -> None:
        if self.beside is not None:
            self.beside.write(checkpoint)
        self.look_for_room(num_bytes)
