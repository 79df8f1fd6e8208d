"""What the terminal shows: one live line while training, plain lines where nobody watches (files, CI)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from longtake.contracts import visible


class _Console(Console):
    """Prompts, captions and names of files steer no terminal."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(visible(one) if isinstance(one, str) else one for one in objects), **options)


def make_console(file: TextIO | None = None, stderr: bool = False) -> Console:
    """The console of a command: colours on a terminal, long lines left whole in files and pipes."""
    console = _Console(file=file, stderr=stderr, highlight=False, markup=False)
    if not console.is_terminal:
        console.soft_wrap = True
    return console


class TrainingProgress:
    """Progress of a training run on rank 0; on other ranks (`enabled=False`) every call does nothing.

    On a terminal one line stays at the bottom and is redrawn; elsewhere every `every`-th step and the last one print
    a line. Use as a context manager, so that the terminal is restored after an error.
    """

    def __init__(
        self,
        total_steps: int,
        start_step: int = 0,
        *,
        console: Console | None = None,
        every: int = 10,
        enabled: bool = True,
    ) -> None:
        self._console = console or make_console()
        self._total, self._every, self._enabled = total_steps, max(1, every), enabled
        self._first, self._start = start_step, time.perf_counter()
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> TrainingProgress:
        self._start = time.perf_counter()
        if self._enabled and self._console.is_terminal:
            columns = (TextColumn("train"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[said]}"))
            self._bar = Progress(*columns, console=self._console, transient=False)
            self._task = self._bar.add_task("train", total=self._total, completed=self._first, said="")
            self._bar.start()
        return self

    def update(self, step: int, values: Mapping[str, float] | None = None) -> None:
        """Step `step` is done. `values`: what is known of it, such as `loss` and `clips/s`; shown in this order.

        Pass only numbers that are on the host already: nothing is read from a device here.
        """
        if not self._enabled:
            return
        said = "  ".join([f"{name} {value:.4g}" for name, value in (values or {}).items()] + [self._eta(step)]).rstrip()
        if self._bar is not None and self._task is not None:
            shown = {"said": said} if values else {}
            self._bar.update(self._task, completed=step, **shown)
        elif step % self._every == 0 or step >= self._total:
            self._console.print(f"step {step}/{self._total}  {said}".rstrip(), soft_wrap=True, markup=False)

    def __exit__(self, *_: object) -> None:
        """Leaves the last state of the line on the screen."""
        if self._bar is not None:
            self._bar.stop()

    def _eta(self, step: int) -> str:
        """Time left at the mean speed since the start."""
        done, left = step - self._first, self._total - step
        if done <= 0 or left <= 0:
            return ""
        seconds = (time.perf_counter() - self._start) / done * left
        return f"ETA {timedelta(seconds=round(seconds))}"
