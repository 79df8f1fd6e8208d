"""Processor time of commands that have nothing to compute, and seconds of an installation.

python benchmarks/startup.py                 every verb's --help, and those that only read; the best of 5 starts
python benchmarks/startup.py --before TREE   another checkout beside this one, in turns
python benchmarks/startup.py --tiny          one start of three commands
python benchmarks/startup.py --install       install what the demo imports from a clean clone, by uv and by pip

An installation is `tools/install.sh` in an empty environment without caches of pip and uv; `--before TREE` adds the one
of another checkout. Starts are user and system time of the whole process, on a table of 100 rows, a preset, and the
folder of a run with 3 checkpoints.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import typer
from machine import commit_of, one_start, parser_of_starts, print_table, write_json

from longtake.checkpoint.save import save_checkpoint
from longtake.cli.app import app

HERE = Path(__file__).resolve().parents[1]
HELP_SECONDS, READING_SECONDS = 0.3, 1.5  # targets
INSTALL_SECONDS = {"uv": 90, "pip": 150}  # targets
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


def measure_install(tree: Path, installer: str) -> dict[str, Any]:
    """Install a commit of a checkout from a clean clone: wall seconds and the size of the environment in MiB."""
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "clone"
        subprocess.run(["git", "clone", "--quiet", str(tree), str(clone)], check=True)
        variables = {**os.environ, "INSTALLER": installer, "PIP_NO_CACHE_DIR": "1", "UV_NO_CACHE": "1"}
        start = time.perf_counter()
        subprocess.run(["bash", "tools/install.sh"], cwd=clone, env=variables, check=True)
        taken = time.perf_counter() - start
        num_bytes = sum(file.lstat().st_size for file in (clone / ".venv").rglob("*") if not file.is_dir())
    return {"seconds": round(taken, 1), "mib": round(num_bytes / 2**20), "commit": commit_of(tree)}


def compare_installs(before: Path | None, json: Path | None) -> None:
    """Measure both installers, and the installer of another checkout; print one table."""
    figures = {name: {**measure_install(HERE, name), "target": INSTALL_SECONDS[name]} for name in INSTALL_SECONDS}
    if before is not None:
        figures["before"] = {**measure_install(before.resolve(), "pip"), "target": None}
    rows = [(name, *(str(line[key]) for key in ("seconds", "target", "mib"))) for name, line in figures.items()]
    print_table(("installer", "s", "at most", "MiB"), rows)
    write_json(json, "startup --install", figures, program="startup")


def main() -> None:
    """Measures and prints one table."""
    parser = parser_of_starts(__doc__)
    parser.add_argument("--install", action="store_true", help="measure installations instead of starts")
    args = parser.parse_args()
    if args.install:
        compare_installs(args.before, args.json)
        return
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
