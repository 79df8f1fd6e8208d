"""What verbs print: complaints, tables, and the progress of work over many files."""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from longtake.contracts import visible
from longtake.durable import write_whole

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_SECONDS_BETWEEN_LINES = 30.0  # where nobody watches
EXIT_MISTAKE = 2
_SECONDS_FOR_TORCHRUN = 5.0  # to see that the first process has ended, and end the others
_LINE, _LINES = 2000, 110  # most characters of a line of a complaint, and lines; configs list up to 101 faults


def complain(sentence: str, to_torchrun: bool = True) -> None:
    """Print the sentence on stderr, with the rank in front where there are several; `to_torchrun`: as the cause of an
    end, which torchrun reports."""
    sentence = visible(_bounded(sentence))
    rank, report = os.environ.get("RANK", "0"), os.environ.get("TORCHELASTIC_ERROR_FILE")
    if report is not None and to_torchrun:  # torchrun shows what is in it at the end of its own report
        error = {"message": f"longtake: {sentence}", "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError):
            write_whole(Path(report), json.dumps({"message": error}))
        if os.environ.get("LOCAL_RANK", "0") != "0" and _said_by_first(Path(report).parents[1] / "0", sentence):
            try:
                time.sleep(_SECONDS_FOR_TORCHRUN)
            except KeyboardInterrupt:  # torchrun has seen how the first one ended, and its report needs no copies of it
                sys.exit(0)
            return
    print(f"longtake: {sentence}" if rank == "0" else f"longtake (rank {rank}): {sentence}", file=sys.stderr)


def _bounded(text: str) -> str:
    """Return a sentence, or several lines of them, without the middle of what is too long to read."""
    lines = [line if len(line) <= _LINE else f"{line[: _LINE - 500]} … {line[-400:]}" for line in text.split("\n")]
    return "\n".join(lines if len(lines) <= _LINES else [*lines[:_LINES], f"… and {len(lines) - _LINES} lines more"])


def _said_by_first(folder: Path, sentence: str) -> bool:
    """Whether the first process of this machine, which reports into `folder`, says the same now or very soon."""
    for report in itertools.repeat(folder / Path(os.environ["TORCHELASTIC_ERROR_FILE"]).name, 20):
        with suppress(OSError, ValueError, KeyError):
            return bool(json.loads(report.read_text(encoding="utf-8"))["message"]["message"] == f"longtake: {sentence}")
        time.sleep(0.1)
    return False


def print_table(
    console: Console, head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[str] = ()
) -> None:
    """Print rows under their heads, columns named in `numbers` at the right. On a terminal a long cell is folded;
    elsewhere each row is one line, for grep and awk."""
    if not console.is_terminal:
        widths = [max(len(line[i]) for line in (head, *rows)) for i in range(len(head))]
        for line in (head, *rows):
            cells = zip(head, line, widths, strict=True)
            print(visible("  ".join(c.rjust(w) if name in numbers else c.ljust(w) for name, c, w in cells).rstrip()))
        return
    console.print(make_table(head, rows, numbers))


def make_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[str] = (), title: str | None = None
) -> Table:
    """Return the table for a terminal."""
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0), title=title, title_justify="left"
    )
    for name in head:
        table.add_column(name, justify="right" if name in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(visible(cell)) for cell in row))
    return table


class Counted:
    """Things done, how many a second and time left: one live line on a terminal, else a line now and then on stderr."""

    def __init__(self, console: Console, doing: str, done: str, things: str, enabled: bool = True):
        """`doing`, `done`, `things`: the words, such as "probing", "probed", "files"."""
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

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
            done = f"{self._done} of {self._total} {self._things} are {self._words}"
            print(f"{done}; the same command continues from there", file=sys.stderr, flush=True)

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
