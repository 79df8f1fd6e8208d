"""`run_demo`: which demo is run, where, and with which overrides."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from longtake.contracts import UserError
from longtake.demo.extras import seen_table
from longtake.demo.place import USUAL, choose_folder, find_run, read_note
from longtake.demo.run import Demo, DemoOutcome, table_of
from longtake.demo.stories import StoryDemo
from longtake.demo.systems import DemoSystem, demo_system
from longtake.parallel.world import start_world
from longtake.train.run_file import read_run

NUM_CLIPS, NUM_STILLS = 2400, 240
_OWN_KEYS = ("dataset.data_path", "dataset.root", "outputs", "exp_name")


def run_demo(
    folder: Path,
    console: Console,
    overrides: Sequence[str] = (),
    num_clips: int = NUM_CLIPS,
    num_stills: int = NUM_STILLS,
    system: str = USUAL,
    of_adapters: Sequence[str] = (),
) -> DemoOutcome:
    """Run the demo in `folder`, going on where an interrupted one left off; beside a finished one in `folder-2`, ...

    `overrides` are of the training run, and remembered; `of_adapters` of that of adapters, where there is one. Under
    torchrun every process calls it; rank 0 speaks and writes. Ctrl-C ends it with a word on how to go on. Raises
    `UserError` for a mistake in the overrides.
    """
    asked, folder, chosen = folder, choose_folder(folder), demo_system(system)
    note = read_note(folder, overrides, num_clips, num_stills, system)
    _refuse_own_keys(note.overrides, chosen)
    source, table = str(find_run(folder) or chosen.run), table_of(folder)
    shown = table if chosen.held_back is None else seen_table(table)
    own = ["--dataset.data-path", str(shown), "--outputs", str(folder), "--exp-name", "run"]
    if chosen.stages and Path(source) == chosen.run:
        own += ["--stage", chosen.stages[-1]]
    config = read_run(source, [*own, *note.overrides]).value
    with start_world(config.device) as world:
        kind = StoryDemo if chosen.stages else Demo
        demo = kind(folder, note, world, console if world.is_main else Console(quiet=True), chosen, config, of_adapters)
        try:
            outcome = demo.take(source)
        except KeyboardInterrupt:
            demo.say("interrupted")
            outcome = DemoOutcome(folder, seconds=note.seconds)
        if outcome.stopped:
            which = "" if system == USUAL else f" --system {system}"
            demo.say(f"to go on with the demo: longtake demo --folder {shlex.quote(str(asked))}{which}")
        return outcome


def _refuse_own_keys(overrides: Sequence[str], system: DemoSystem) -> None:
    """Raise `UserError` for a key that the demo sets itself."""
    for word in overrides:
        name = word.removeprefix("--").split("=")[0].replace("-", "_")
        if word.startswith("--") and name in _OWN_KEYS:
            raise UserError(
                f"{word.split('=')[0]}: the demo makes its own clips and folders; choose the place with --folder, "
                f"or train on other clips with longtake train {system.run} --dataset.data-path clips.csv"
            )
