"""Host activity in a training step: where it waits for the device, and how much it asks of it.

python benchmarks/waits.py                     every family and mode of this checkout
python benchmarks/waits.py --before TREE       another checkout too, in the same run
python benchmarks/waits.py --mode "cogvideox inpaint" --json FILE

Real training runs of tiny models on the fake CUDA device of the tests, which needs g++ and a PyTorch without CUDA. Of
the last of three steps, two micro-batches each: `waits`, where the host waits for all kernels launched so far (a
blocking copy, a number read); `pageable`, copies from memory that is not pinned; `launches`, operations of PyTorch that
the device is asked for, in all and for the inputs; `ahead`, how many of them, those of the step before included, the
device may still have to compute once the first inputs of the step are launched: the host has not waited for them.

`masks`: milliseconds and bytes of one sample's mask of CogVideoX-Fun at 49 x 384 x 672, which data workers draw.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import commit_of, print_table, write_json

HERE = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(HERE)]
SHAPE = (49, 384, 672)

from tests.pretended.library import build_library  # noqa: E402
from tests.pretended.steps import MODES  # noqa: E402


def main() -> None:
    """Measures and prints one table."""
    arguments = _arguments()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        library = build_library(Path(name))
        for label, tree in (("before", arguments.before), ("now", HERE)):
            if tree is not None:
                folder = Path(name) / label
                folder.mkdir()
                modes = [mode for mode in arguments.mode or MODES if _has_family(tree, mode)]
                steps = _steps(library, folder, tree.resolve(), modes)
                figures[label] = {"commit": commit_of(tree), "modes": {mode: _row(run) for mode, run in steps.items()}}
    columns = ("waits", "pageable", "launches", "for_inputs", "ahead")
    for label, of_tree in figures.items():
        print(f"{label}: {of_tree['commit']}")
        print_table(("mode", *columns), [(mode, *(row[c] for c in columns)) for mode, row in of_tree["modes"].items()])
    masks = _masks()
    print_table(("mask", "ms", "bytes", "bytes as float32"), [(kind, *row.values()) for kind, row in masks.items()])
    write_json(arguments.json, "waits", {**figures, "masks": masks})


def _has_family(tree: Path, mode: str) -> bool:
    """False for families that an earlier checkout did not have."""
    family, *_ = MODES[mode][0].split("/")
    return (tree / "longtake" / "presets" / family).is_dir()


def _steps(library: Path, folder: Path, tree: Path, modes: list[str]) -> dict[str, Any]:
    program = HERE / "tests" / "pretended" / "steps.py"
    command = [sys.executable, str(program), str(library), str(folder), str(tree), *modes]
    subprocess.run(command, check=True, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return json.loads((folder / "steps.json").read_text())


def _row(run: dict[str, Any]) -> dict[str, Any]:
    """Of the last step of a run; `waits` and `pageable` also with where they were."""
    if run["error"]:
        raise SystemExit(run["error"])
    before, step = run["steps"][-2:]
    launched = step["forwards"][0]
    over = max((last for at, last in (*before["reads"], *step["reads"]) if at <= launched), default=0)
    return {
        "waits": len(step["waits"]),
        "pageable": len(step["pageable"]),
        "launches": step["launches"],
        "for_inputs": sum(end - start for start, end in zip(step["prepares"], step["forwards"], strict=True)),
        "ahead": launched - max(over, before["begins"]),
        "where": sorted({*step["waits"], *step["pageable"]}),
    }


def _masks() -> dict[str, Any]:
    """By kind, the fastest of five draws."""
    from longtake.families.cogvideox_masks import MASKS
    from longtake.random import OwnNumbers

    found = {}
    for kind, (draw, *_) in MASKS.items():
        seconds = []
        for number in range(5):
            start = time.perf_counter()
            mask = draw(OwnNumbers(number), SHAPE)
            seconds.append(time.perf_counter() - start)
        found[kind] = {"ms": round(1e3 * min(seconds), 2), "bytes": mask.nbytes, "as_float32": 4 * mask.size}
    return found


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, metavar="TREE", help="a checkout of an earlier commit")
    parser.add_argument("--mode", action="append", choices=tuple(MODES), help="one of them; may be repeated")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
