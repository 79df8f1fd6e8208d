"""Terminal output of a run: one live line while training, plain lines where nobody watches (files, CI)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TaskProgressColumn, TextColumn
from rich.table import Column

from longtake.contracts import visible

_MOST_BAR, _LEAST_BAR, _NEXT_TO_BAR = 20, 5, 60  # columns


class _Console(Console):
    """Prompts, captions and names of files steer no terminal."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(visible(one) if isinstance(one, str) else one for one in objects), **options)


def make_console(file: TextIO | None = None, stderr: bool = False) -> Console:
    """Return the console of a command: colours on a terminal, long lines left whole in files and pipes."""
    console = _Console(file=file, stderr=stderr, highlight=False, markup=False)
    if not console.is_terminal:
        console.soft_wrap = True
    return console


class PlainProgress:
    """Shares of a long task as plain lines, for files: no line in its first seconds, then one every half minute."""

    FIRST_SECONDS, EVERY_SECONDS = 5.0, 30.0

    def __init__(self, console: Console, name: str) -> None:
        self._console, self._name = console, name
        self._next = time.perf_counter() + self.FIRST_SECONDS

    def __call__(self, share: float) -> None:
        """`share` of the task, 0 to 1, is done."""
        if (now := time.perf_counter()) >= self._next:
            self._next = now + self.EVERY_SECONDS
            self._console.print(f"{self._name}: {share:.0%}", soft_wrap=True, markup=False)


@contextmanager
def task_progress(console: Console, name: str, enabled: bool = True) -> Iterator[Callable[[float], None]]:
    """Show how far a long task is: a live line on a terminal, plain lines elsewhere. Yields the function that takes the
    share that is done, 0 to 1; it does nothing with `enabled=False`, as on other ranks than 0."""
    if not enabled:
        yield lambda share: None
    elif not console.is_terminal:
        yield PlainProgress(console, name)
    else:
        with Progress(
            TextColumn(name), BarColumn(_MOST_BAR), TaskProgressColumn(), console=console, transient=True
        ) as bar:
            task = bar.add_task(name, total=1.0)
            yield lambda share: bar.update(task, completed=share)


class TrainingProgress:
    """Progress of a training run on rank 0; on other ranks (`enabled=False`) every call does nothing.

    On a terminal one line stays at the bottom and is redrawn; elsewhere every `every`-th step and the last one print
    a line. Use as a context manager, so that the terminal is restored after an error.
    """

    RECENT_STEPS = 50  # that the time left is measured by

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
        self._first = start_step
        self._recent: deque[tuple[int, float]] = deque(maxlen=1 + self.RECENT_STEPS)  # step and when it was done
        self._values: dict[str, float] = {}  # the last ones that were shown
        self._bar_width = max(_LEAST_BAR, min(_MOST_BAR, self._console.width - _NEXT_TO_BAR))
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> TrainingProgress:
        if self._enabled and self._console.is_terminal:
            whole = {"table_column": Column(no_wrap=True)}
            columns = (
                TextColumn("train", **whole),
                BarColumn(self._bar_width, **whole),
                MofNCompleteColumn(**whole),
                TextColumn("{task.fields[text]}", **whole),
            )
            self._bar = Progress(*columns, console=self._console, transient=False)
            self._task = self._bar.add_task("train", total=self._total, completed=self._first, text="")
            self._bar.start()
        return self

    def update(self, step: int, values: Mapping[str, float] | None = None) -> None:
        """Step `step` is done. `values`: what is known of it, such as `loss` and `clips/s`; shown in this order.

        Pass only numbers that are on the host already: nothing is read from a device here.
        """
        if not self._enabled:
            return
        self._recent.append((step, time.perf_counter()))
        if self._bar is not None and self._task is not None:
            self._values = {**self._values, **(values or {})}
            self._bar.update(self._task, completed=step, text=self._fitting(self._eta(step)))
        elif step % self._every == 0 or step >= self._total:
            text = "  ".join([*_texts(values or {}), self._eta(step)]).rstrip()
            self._console.print(f"step {step}/{self._total}  {text}".rstrip(), soft_wrap=True, markup=False)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time inside out of the speed of steps."""
        start = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            self._recent = deque(((step, mark + elapsed) for step, mark in self._recent), self._recent.maxlen)

    def __exit__(self, *_: object) -> None:
        """Leave the last state of the line on the screen."""
        if self._bar is not None:
            self._bar.stop()

    def task(self, name: str) -> Callable[[float], None]:
        """Return the function that shows which share of a long task between two steps is done, 0 to 1."""
        if not self._enabled:
            return lambda share: None
        bar, task = self._bar, self._task
        if bar is None or task is None:
            return PlainProgress(self._console, name)
        return lambda share: bar.update(task, text=self._fitting(f"{name} {share:.0%}"))

    def _eta(self, step: int) -> str:
        """Time left at the mean speed of recent steps; the first step, which compiles, is none of them."""
        (before, start), (_, now) = self._recent[0], self._recent[-1]
        left = self._total - step
        if step <= before or left <= 0:
            return ""
        return f"ETA {timedelta(seconds=round((now - start) / (step - before) * left))}"

    def _fitting(self, text: str) -> str:
        """`text`, and behind it as many of the last values as the terminal's width has room for."""
        room = self._console.width - len("train ") - self._bar_width - 1 - len(f"{self._total}/{self._total}") - 1
        for value in _texts(self._values):
            longer = f"{text}  {value}" if text else value
            if len(longer) > room:
                break
            text = longer
        return text


def _texts(values: Mapping[str, float]) -> list[str]:
    return [f"{name} {value:.4g}" for name, value in values.items()]
