"""The order of a pass from the numeric columns of a clip table, beside a loop over rows of the reference's rule.

python benchmarks/order.py                      1 M, 10 M and 100 M clips, five bucket tables
python benchmarks/order.py --rows 1e6 --table stage1
python benchmarks/order.py --tiny               a small table, to see that it runs

Every line is a process of its own, so its peak memory is its own: Python, the columns (28 bytes a clip) and the work.
Slots are balanced by cost, as a run's are. The last line of a size has the first table with each clip at weight 1.25 of
a mix, so a quarter of the clips has a second copy.
The loop is run on a few thousand rows before and after, and the faster of the two counts: it is short, uses no data
frame, and the rule is all it does (no sort, no keys), so the reference itself is slower.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from bucket_tables import CONFIGS, bucket_rule, clip_columns
from machine import print_table, write_json

from longtake.buckets.assignment import BucketRule
from longtake.buckets.inputs import OrderInputs
from longtake.buckets.mix import CostModel
from longtake.buckets.order import plan_pass
from longtake.contracts import LatentShape

TARGET_RATIO = 25  # times the loop, per core
TARGET_SECONDS = {10_000_000: 6.0, 100_000_000: 75.0}  # on 2 cores
TARGET_GB = {10_000_000: 1.5}
LOOP_ROWS = 20_000
SLOTS = 64  # of a step
MIX_WEIGHT = 1.25  # of every clip, in the lines that show what a mix costs


def main() -> None:
    """Measures each table at each size and prints one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=float, action="append", help="clips; default: 1e6, 1e7 and 1e8")
    parser.add_argument("--table", choices=CONFIGS, action="append", help="bucket table; default: all")
    parser.add_argument("--repeats", type=int, default=2, help="passes planned in each process; the fastest counts")
    parser.add_argument("--tiny", action="store_true", help="20,000 clips, two tables")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--one", nargs=4, metavar=("TABLE", "ROWS", "REPEATS", "WEIGHT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        table, rows, repeats, weight = arguments.one
        print(json.dumps(measure(table, int(rows), int(repeats), float(weight))))
        return
    sizes = [20_000] if arguments.tiny else [int(rows) for rows in arguments.rows or (1e6, 1e7, 1e8)]
    tables = ["stage1", "B3"] if arguments.tiny else arguments.table or list(CONFIGS)
    figures = [
        _in_process(table, rows, arguments.repeats, weight)
        for rows in sizes
        for table, weight in [*((table, 1.0) for table in tables), (tables[0], MIX_WEIGHT)]
    ]
    head = (
        "clips",
        "table",
        "weight",
        "buckets",
        "seconds",
        "core-seconds",
        "peak GB",
        "us a clip",
        "loop us",
        "ratio",
        "steps",
    )
    print_table(head, [_row(line) for line in figures])
    print(
        f"targets: ratio >= {TARGET_RATIO} per core; 10 M in <= 6 s and <= 1.5 GB, 100 M in <= 75 s, on 2 quiet cores"
    )
    missed = [line for line in figures if _misses(line)]
    for line in missed:
        print(f"missed: {line['table']} at {line['clips']:,} clips: {', '.join(_misses(line))}")
    write_json(arguments.json, "order", {"tiny": arguments.tiny, "cores": _cores(), "runs": figures})


def measure(table: str, num_clips: int, repeats: int, weight: float) -> dict[str, Any]:
    """Plans passes over a made-up table, as a run does by default; the figures of the fastest."""
    rule = bucket_rule(table)
    columns = clip_columns(num_clips)
    loop = [row_loop(bucket_rule(table, compat=True), columns, LOOP_ROWS)]
    cost = CostModel(1e9, 1e9, 1e4, LatentShape(16, 4, 8, causal=True), patch=2, side_by_side=SLOTS)
    weights = np.full(num_clips, weight, np.float32)
    made = {"seed": 1, "stage": 0, "slots_per_step": SLOTS, "rule": rule, "table": "made up", "cost": cost}
    inputs = OrderInputs(**made, **columns, weights=weights)
    runs = []
    for pass_index in range(repeats):
        wall, core = time.perf_counter(), time.process_time()
        order = plan_pass(inputs, pass_index)
        order.step(0)
        runs.append((time.perf_counter() - wall, time.process_time() - core))
        num_steps, num_used = order.num_steps, order.report.num_used
        del order
    loop.append(row_loop(bucket_rule(table, compat=True), columns, LOOP_ROWS))
    seconds, core_seconds = min(runs)
    return {
        "clips": num_clips,
        "table": table,
        "weight": weight,
        "buckets": len(rule.buckets),
        "seconds": seconds,
        "core_seconds": core_seconds,
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
        "loop_us": min(loop) * 1e6,
        "ratio": min(loop) / (core_seconds / num_clips),
        "steps": num_steps,
        "used": num_used,
    }


def row_loop(rule: BucketRule, columns: dict[str, np.ndarray], num_rows: int) -> float:
    """Seconds a row of a plain loop that gives each row its bucket by the reference's rule.

    As there: a NumPy generator for each row (for each row and entry under Open-Sora 1.2), resolutions from the
    largest, lengths from the longest, the nearest ratio by `min`.
    """
    law, number = rule.walk, len(rule.buckets)
    walk = [
        (each.num_pixels, {entry.num_frames: entry for entry in each.entries}, _ratios(rule, each.ratios))
        for each in rule.resolutions
    ]
    rows = list(
        zip(*(columns[name][:num_rows].tolist() for name in ("num_frames", "height", "width", "fps")), strict=True)
    )
    start = time.process_time()
    places: dict[tuple[int, int, str], list[int]] = {}
    for row, (frames, height, width, fps) in enumerate(rows):
        seed = 42 + row * number
        if law.fixed_interval:
            length, generator = frames, None
        else:
            interval = 1 if fps <= 24 else -int(-fps // 24)
            length, generator = frames // interval, np.random.default_rng(seed)
        place = _place(walk, length, height, width, generator, seed, law.longer)
        if place is not None:
            places.setdefault(place, []).append(row)
    return (time.process_time() - start) / len(rows)


def _place(
    walk: list, length: int, height: int, width: int, generator: np.random.Generator | None, seed: int, longer: bool
) -> tuple[int, int, str] | None:
    """(resolution, frames, ratio) of one clip, or None."""
    ordinal = 0
    for number, (num_pixels, entries, ratios) in enumerate(walk):
        first, ordinal = ordinal, ordinal + len(entries)
        if height * width < 0.8 * num_pixels:
            continue
        chosen = None
        for offset, (frames, entry) in enumerate(entries.items()):
            draws = generator or np.random.default_rng(seed + first + offset)
            if (length == 1) != (frames == 1):
                continue
            if entry.skip is not None and draws.random() < entry.skip:
                continue
            if frames == 1 or (length > frames if longer else length >= frames):
                chosen = frames, entry, draws
                break
        if chosen is not None and (chosen[1].keep >= 1 or chosen[2].random() < chosen[1].keep):
            ratio = height / width
            return number, chosen[0], min(ratios, key=lambda name: abs(ratios[name] - ratio))
    return None


def _ratios(rule: BucketRule, table: dict[str, tuple[int, int]]) -> dict[str, float]:
    """Ratio name -> H/W as the reference reads it off the name."""
    if rule.walk.nearest == "key":
        return {name: float(name) for name in table}
    return {name: float(name.split(":")[1]) / float(name.split(":")[0]) for name in table}


def _in_process(table: str, num_clips: int, repeats: int, weight: float) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", table, str(num_clips), str(repeats), str(weight)]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(found.stdout)


def _row(line: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{line['clips']:,}",
        line["table"],
        f"{line['weight']:g}",
        str(line["buckets"]),
        f"{line['seconds']:.2f}",
        f"{line['core_seconds']:.2f}",
        f"{line['peak_gb']:.2f}",
        f"{line['core_seconds'] / line['clips'] * 1e6:.2f}",
        f"{line['loop_us']:.1f}",
        f"{line['ratio']:.0f}",
        str(line["steps"]),
    )


def _misses(line: dict[str, Any]) -> list[str]:
    """The targets that a measurement misses; small tables have none."""
    found = []
    if line["clips"] >= 1_000_000 and line["ratio"] < TARGET_RATIO:
        found.append(f"ratio {line['ratio']:.0f}")
    if line["seconds"] > TARGET_SECONDS.get(line["clips"], float("inf")):
        found.append(f"{line['seconds']:.1f} s")
    if line["peak_gb"] > TARGET_GB.get(line["clips"], float("inf")):
        found.append(f"{line['peak_gb']:.2f} GB")
    return found


def _cores() -> int:
    return len(os.sched_getaffinity(0))


if __name__ == "__main__":
    main()
