"""`longtake data ...`: clip tables."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from longtake.cli.options import help_without_verb
from longtake.contracts import UserError
from longtake.data import probe_table
from longtake.track import make_console

app = typer.Typer(help="Clip tables: fill one in.", invoke_without_command=True, callback=help_without_verb)

_SECONDS_BETWEEN_LINES = 30.0  # where nobody watches


class Engine(StrEnum):
    """Who spreads the files over processes."""

    local = "local"
    ray = "ray"


@app.command()
def probe(
    table: Annotated[
        Path, typer.Argument(help="CSV, Parquet, Arrow, JSON or JSONL with a column `path`, and usually `text`.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The table to write: .csv, .parquet, .arrow, .json or .jsonl.")
    ],
    workers: Annotated[int, typer.Option(min=0, help="Processes; 0 works in this one (ray: one a core).")] = 0,
    root: Annotated[
        Path | None, typer.Option(help="Folder that relative paths start from; default: the table's.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Fail if any file is bad.")] = False,
    decode_check: Annotated[
        bool, typer.Option("--decode-check", help="Also decode every file, and leave out those that fail.")
    ] = False,
    part: Annotated[
        str | None, typer.Option(metavar="I/N", help="Do the I-th of N parts of the table, counted from 1.")
    ] = None,
    engine: Annotated[Engine, typer.Option(help="`ray` spreads the files over a Ray cluster.")] = Engine.local,
) -> None:
    """Fill in width, height, frames, fps and the rest from the files' headers, without decoding them.

    A file that cannot be used costs its row: it is listed with the reason in OUTPUT's name with .bad.csv. After an
    interruption the same command continues where it stopped.
    """
    console = make_console()
    with _Progress(console) as shown:
        result = probe_table(
            table,
            output,
            workers=workers,
            root=root,
            strict=strict,
            decode_check=decode_check,
            part=None if part is None else _read_part(part),
            engine=engine.value,
            progress=shown.update,
        )
    if result.continued:
        console.print(f"{result.continued} were probed before", markup=False)
    console.print(f"{result.kept} clips in {result.target}", markup=False)
    if result.bad:
        warning = f"warning: {result.bad} bad {'file' if result.bad == 1 else 'files'} left out, listed with reasons in"
        console.print(f"{warning} {result.bad_path}", style="yellow", markup=False)


def _read_part(words: str) -> tuple[int, int]:
    number, slash, count = words.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal()):
        raise UserError(f"--part {words}: expected I/N, the number of the part and of all parts, such as 3/16")
    return int(number), int(count)


class _Progress:
    """Files done, files a second and time left: one live line on a terminal, else a line now and then on stderr."""

    def __init__(self, console: Console):
        self._bar = Progress(
            *(TextColumn("probing"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[said]}")),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("probe", total=None, said="")
        self._live = console.is_terminal
        self._first: int | None = None
        self._done = self._total = 0
        self._begun = self._printed = time.monotonic()

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._bar.stop()
        if kind is not None and issubclass(kind, KeyboardInterrupt) and self._total:
            told = f"{self._done} of {self._total} files are probed; the same command continues from there"
            print(told, file=sys.stderr, flush=True)

    def update(self, done: int, total: int) -> None:
        """`done` of `total` files are probed; the first call says how many were before."""
        now = time.monotonic()
        if self._first is None:
            self._first, self._begun = done, now
        self._done, self._total = done, total
        if now - self._printed < (0.1 if self._live else _SECONDS_BETWEEN_LINES) and done < total:
            return
        speed = (done - self._first) / max(now - self._begun, 1e-6)
        said = f"{speed:,.0f} files/s" if done > self._first else ""
        if done > self._first and done < total:
            said += f"  {timedelta(seconds=round((total - done) / speed))} left"
        if self._live:
            self._bar.update(self._task, completed=done, total=total, said=said)
        elif now - self._printed >= _SECONDS_BETWEEN_LINES:
            print(f"probed {done}/{total}  {said}".rstrip(), file=sys.stderr, flush=True)
        self._printed = now
