"""Progress of work over many files, as verbs show it."""

from __future__ import annotations

import sys
import time
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

_SECONDS_BETWEEN_LINES = 30.0  # where nobody watches


class Counted:
    """Things done, how many a second and time left: one live line on a terminal, else a line now and then on stderr."""

    def __init__(self, console: Console, doing: str, done: str, things: str, enabled: bool = True):
        """`doing`, `done`, `things`: the words, such as "probing", "probed", "files"."""
        self._words, self._things, self._enabled = done, things, enabled
        self._bar = Progress(
            *(TextColumn(doing), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[said]}")),
            console=console,
            transient=True,
            disable=not (console.is_terminal and enabled),
        )
        self._task = self._bar.add_task(doing, total=None, said="")
        self._live = console.is_terminal
        self._first: int | None = None
        self._done = self._total = 0
        self._begun = self._printed = time.monotonic()

    def __enter__(self) -> Counted:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._bar.stop()
        if self._enabled and kind is not None and issubclass(kind, KeyboardInterrupt) and self._total:
            told = (
                f"{self._done} of {self._total} {self._things} are {self._words}; the same command continues from there"
            )
            print(told, file=sys.stderr, flush=True)

    def update(self, done: int, total: int) -> None:
        """`done` of `total` things are done; the first call says how many were before."""
        if not self._enabled:
            return
        now = time.monotonic()
        if self._first is None:
            self._first, self._begun = done, now
        self._done, self._total = done, total
        if now - self._printed < (0.1 if self._live else _SECONDS_BETWEEN_LINES) and done < total:
            return
        speed = (done - self._first) / max(now - self._begun, 1e-6)
        said = f"{speed:,.0f} {self._things}/s" if done > self._first else ""
        if done > self._first and done < total:
            said += f"  {timedelta(seconds=round((total - done) / speed))} left"
        if self._live:
            self._bar.update(self._task, completed=done, total=total, said=said)
        elif now - self._printed >= _SECONDS_BETWEEN_LINES:
            print(f"{self._words} {done}/{total}  {said}".rstrip(), file=sys.stderr, flush=True)
        self._printed = now
