"""What `longtake plan` takes from its start to its end: processor time and wall clock of the whole process.

python benchmarks/plan.py                 every preset of training on 8 GPUs, one compiled, and 1,025 entries; the best
                                          of 3 starts, and the first, which finds the user's cache empty
python benchmarks/plan.py --before TREE   another checkout beside this one, in turns
python benchmarks/plan.py --tiny          one start for two presets

The 1,025 entries are 41 lengths at each of 25 resolutions, each at its largest aspect ratio, of stage 1's model.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from machine import commit_of, one_start, parser_of_starts, print_table, write_json

from longtake.presets import find_preset, presets

HERE = Path(__file__).resolve().parents[1]
PRESET_SECONDS, MANY_SECONDS = 5.0, 15.0  # targets, of two cores
COMPILED, MANY = "opensora_v2/stage1 --compile True", "1,025 entries"
FULL = "opensora_v2/"  # presets of full-size models; those that are stages of others have no plan of their own


def many_entries(folder: Path) -> Path:
    """A run of stage 1's model with 1,025 entries in its bucket table."""
    sizes = {f"{side}px": dict.fromkeys(range(1, 162, 4), (1.0, 1)) for side in range(192, 592, 16)}
    run = folder / "many.py"
    stage = str(find_preset("opensora_v2/stage1"))
    run.write_text(f"_base_ = {stage!r}\nbucket_config = {sizes | {'_delete_': True}!r}\n", encoding="utf-8")
    return run


def one_plan(tree: Path, run: Sequence[str]) -> tuple[float, float]:
    """Processor and wall seconds of one plan."""
    words = ("plan", *run, "--dataset.data-path", "clips.parquet")
    status, processor, wall = one_start(tree, words)
    assert status in (0, 2), run  # 2: it does not fit
    return processor, wall


def measure(run: Sequence[str], trees: dict[str, Path], starts: int) -> dict[str, Any]:
    """The least processor and wall seconds in each tree, and the processor's of the first start."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in trees}
    for _ in range(starts):
        for name, tree in trees.items():
            found[name].append(one_plan(tree, run))
    figures: dict[str, Any] = {}
    for name, taken in found.items():
        figures["processor_seconds" + name], figures["wall_seconds" + name] = map(min, zip(*taken, strict=True))
        figures["first_seconds" + name] = taken[0][0]
    return figures


def main() -> None:
    """Measures and prints one table."""
    args = parser_of_starts(__doc__).parse_args()
    trees = {"": HERE} | ({"_before": args.before.resolve()} if args.before else {})
    listed = {one.name: one.path for one in presets() if one.kind == "train" and one.name.startswith(FULL)}
    listed.pop("opensora_v2/curriculum", None)
    with tempfile.TemporaryDirectory() as place:
        os.environ["XDG_CACHE_HOME"] = place
        runs = {name: (str(path),) for name, path in listed.items()}
        if args.tiny:
            runs = dict([*runs.items()][:2])
        else:
            runs[COMPILED] = (*runs["opensora_v2/stage1"], "--compile", "True")
            runs[MANY] = (str(many_entries(Path(place))),)
        figures = []
        for name, run in runs.items():
            target = MANY_SECONDS if name == MANY else PRESET_SECONDS
            figures.append({"run": name, **measure(run, trees, 1 if args.tiny else 3), "target": target})
    rows = [(line["run"], *(f"{number:.2f}" for number in [*line.values()][1:])) for line in figures]
    columns = [f"{kind} s{name.replace('_', ' ')}" for name in trees for kind in ("processor", "wall", "first")]
    print_table(("run", *columns, "at most"), rows)
    before = {"commit_before": commit_of(args.before)} if args.before else {}
    write_json(args.json, "plan", {**before, "plans": figures})


if __name__ == "__main__":
    main()
