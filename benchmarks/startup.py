"""Processor time until a command answers that has nothing to compute: what it costs to start.

python benchmarks/startup.py                 every verb's --help, and those that only read; the best of 5 starts
python benchmarks/startup.py --before TREE   another checkout beside this one, in turns
python benchmarks/startup.py --tiny          one start of three commands

User and system time of the whole process, on a table of 100 rows, a preset, and the folder of a run with 3 checkpoints.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import typer
from machine import arguments_of_starts, commit_of, one_start, print_table, write_json

from longtake.checkpoint import save_checkpoint
from longtake.cli.app import app

HERE = Path(__file__).resolve().parents[1]
HELP_SECONDS, READING_SECONDS = 0.3, 1.5  # targets
Words = tuple[str, ...]


def verbs(command: Any, words: Words = ()) -> Iterator[Words]:
    """The words of every verb and group, the command itself first."""
    yield words
    for name, inner in getattr(command, "commands", {}).items():
        yield from verbs(inner, (*words, name))


def reading(folder: Path) -> dict[str, Words]:
    """Command lines that read and print, by name; what they read is made here."""
    table, run = folder / "clips.csv", folder / "run"
    rows = [f"{number}.mp4,a clip,{24 + number},256,256,24" for number in range(100)]
    table.write_text("\n".join(["path,text,num_frames,height,width,fps", *rows]) + "\n", encoding="utf-8")
    run.mkdir()
    for step in (1, 2, 3):
        save_checkpoint(run, 0, step, {"model.weight": torch.zeros(8)}, {"step": step})
    preset = HERE / "configs" / "opensora_v2" / "train" / "stage1.py"
    return {
        "config show": ("config", "show", str(preset), "--dataset.data-path", str(table)),
        "data stats": ("data", "stats", str(table)),
        "checkpoint list": ("checkpoint", "list", str(run)),
    }


def seconds(tree: Path, words: Words) -> float | None:
    """Processor time of one start; None in an earlier tree that does not know the words."""
    status, processor, _ = one_start(tree, words)
    assert status == 0 or tree != HERE, words
    return processor if status == 0 else None


def main() -> None:
    """Measures and prints one table."""
    args = arguments_of_starts(__doc__)
    trees = {"seconds": HERE} | ({"seconds_before": args.before.resolve()} if args.before else {})
    starts = range(2 if args.tiny else 6)
    with tempfile.TemporaryDirectory() as place:
        lines = {" ".join([*words, "--help"]): (*words, "--help") for words in verbs(typer.main.get_command(app))}
        lines |= reading(Path(place))
        figures = []
        for name in [*lines][:2] + [*lines][-1:] if args.tiny else lines:
            taken: dict[str, float | None] = {}
            for start in starts:
                for key, tree in trees.items():
                    used = seconds(tree, lines[name])
                    if start > 0 and used is not None:  # the first start may have to compile modules
                        taken[key] = min(taken.get(key) or used, used)
            target = HELP_SECONDS if name.endswith("--help") else READING_SECONDS
            figures.append({"command": name, **{key: taken.get(key) for key in trees}, "target": target})
    rows = []
    for line in figures:
        name, *numbers = line.values()
        rows.append((f"longtake {name}", *("-" if number is None else f"{number:.2f}" for number in numbers)))
    print_table(("command", "processor s", *(["before"] if args.before else []), "at most"), rows)
    before = {"commit_before": commit_of(args.before)} if args.before else {}
    write_json(args.json, "startup", {**before, "commands": figures})


if __name__ == "__main__":
    main()
