"""`run_all`: the demos of all systems one after another, and one page for them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from longtake.demo.judge import JUDGED
from longtake.demo.place import REPORT, SUMMARY, numbered, usual_name
from longtake.demo.run import DemoOutcome
from longtake.demo.start import run_demo
from longtake.demo.systems import about, system_names
from longtake.durable import write_whole
from longtake.pages import Html, duration, html, joined, meter, page, table
from longtake.parallel.world import start_world
from longtake.small_files import parse_json

ALL = "all"
PAGE = "demos.html"


def run_all(folder: Path, console: Console, overrides: Sequence[str] = (), **sizes: Any) -> DemoOutcome:
    """Run the demo of each system in a folder of its own in `folder`, those that are not finished there, and write
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
                again = f"longtake demo --folder {shlex.quote(str(folder))} --system {ALL}"
                console.print(f"to go on with all of them: {again}", markup=False, soft_wrap=True)
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
    """Write the page of finished demos, by system, whole or not at all."""
    summaries = {system: parse_json((demo / SUMMARY).read_text("utf-8")) for system, demo in demos.items()}
    lead = (
        "Each system was trained on made-up clips of coloured shapes that move, and made videos from prompts, which a "
        "judge that is shown nothing but pixels looked at. Here are the shares that it found right of videos whose "
        "prompts are as in training; below, each system with some of them and with all that was judged."
    )
    rows = [
        [system, of["model"], f"{of['steps']:,}", duration(of["seconds"]), *_shares(of["rows"][0][2:5])]
        for system, of in summaries.items()
    ]
    found = table(("system", "model", "steps", "time", *JUDGED), rows, words=(0, 1))
    parts = [_section(system, demos[system], of, path.parent) for system, of in summaries.items()]
    write_whole(path, page("Longtake's demos", html("<p>{}</p>{}", lead, found), *parts))


def _section(system: str, demo: Path, of: Mapping[str, Any], root: Path) -> Html:
    rows = [[title, count, *_shares(shares)] for title, count, *shares in of["rows"]]
    judged = table(of["columns"], rows)
    head = html("<h2>{}</h2><p>{} All of it: {}</p>", system, about(system), (demo / REPORT).relative_to(root))
    checks = table(("what", "found", "wanted"), of["checks"], words=(0,)) if of["checks"] else ""
    return joined([head, Html(of["shown"]), judged, checks])


def _shares(shares: Sequence[str]) -> list[Html]:
    return [meter(float(share)) for share in shares]


def _finished(home: Path) -> Path | None:
    """Return the newest finished demo of a system, in its usual folder or a numbered one."""
    found = None
    for folder in numbered(home):
        if not folder.exists():
            return found
        if (folder / REPORT).exists() and (folder / SUMMARY).exists():
            found = folder
    raise AssertionError("numbers do not end")
