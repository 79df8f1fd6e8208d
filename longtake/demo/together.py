"""`run_all`: the demos of all systems one after another, and one page for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from longtake.demo.place import REPORT, SUMMARY, numbered, usual_name
from longtake.demo.run import DemoOutcome
from longtake.demo.start import run_demo
from longtake.demo.systems import system_names
from longtake.durable import write_whole
from longtake.pages import Html, duration, html, joined, meter, page, percent, table
from longtake.parallel import start_world
from longtake.small_files import parse_json

ALL = "all"
PAGE = "demos.html"


def run_all(folder: Path, console: Console, overrides: Sequence[str] = (), **sizes: Any) -> DemoOutcome:
    """Runs the demo of each system in a folder of its own in `folder`, those that are not finished there, and writes
    `demos.html`. `overrides` and `sizes` as for `run_demo`, of each. The outcome is that of the last, or of the one
    that was interrupted. Raises `UserError` as `run_demo` does."""
    found: dict[str, Path] = {}
    outcome = DemoOutcome(folder)
    for system in system_names():
        done = _finished(folder / usual_name(system))
        if done is None:
            console.print(f"the demo of {system}", style="bold")
            outcome = run_demo(folder / usual_name(system), console, overrides, system=system, **sizes)
            if outcome.stopped:
                console.print(f"to go on with all of them: longtake demo --folder {folder} --system {ALL}")
                return outcome
            done = outcome.folder
        else:
            console.print(f"{system}: finished before, in {done}", markup=False)
        found[system] = done
    with start_world("cpu") as world:
        world.on_main(lambda: write_page(folder / PAGE, found))
    console.print(f"one page for all: {folder / PAGE}", markup=False, soft_wrap=True)
    return DemoOutcome(folder, outcome.run, outcome.accuracy, outcome.checks, folder / PAGE, outcome.seconds)


def write_page(path: Path, demos: Mapping[str, Path]) -> None:
    """Writes the page of finished demos, by system, whole or not at all."""
    summaries = {system: parse_json((demo / SUMMARY).read_text("utf-8")) for system, demo in demos.items()}
    lead = (
        "Each system was trained on made-up clips of coloured shapes that move, and made videos from prompts, which a "
        "judge that is shown nothing but pixels looked at. The first row of a system is of prompts as in training."
    )
    rows: list[Sequence[object]] = []
    for system, of in summaries.items():
        rows.append([f"{system}: {of['model']}, {of['steps']:,} steps, {duration(of['seconds'])}"])
        rows += [[title, count, *map(meter, map(float, shares))] for title, count, *shares in of["rows"]]
        rows += [[f"{what} (wanted: {wanted})", value, "", "", "", ""] for what, value, wanted in of["checks"]]
    columns = ("videos", "count", "colour", "direction", "both", "continuity")
    parts = [html("<p>{}</p>{}", lead, table(columns, rows))]
    parts += [_section(system, demos[system], of, path.parent) for system, of in summaries.items()]
    write_whole(path, page("Longtake's demos", *parts))


def _section(system: str, demo: Path, of: Mapping[str, Any], root: Path) -> Html:
    colour, direction = (percent(float(share)) for share in of["rows"][0][2:4])
    head = html("<h2>{}</h2><p>colour {}, direction {} right; ", system, colour, direction)
    place = html("all of it: {}</p>", (demo / REPORT).relative_to(root))
    return joined([head, place, Html(of["shown"])])


def _finished(home: Path) -> Path | None:
    """The newest finished demo of a system, in its usual folder or a numbered one."""
    found = None
    for folder in numbered(home):
        if not folder.exists():
            return found
        if (folder / REPORT).exists() and (folder / SUMMARY).exists():
            found = folder
    raise AssertionError("numbers do not end")
