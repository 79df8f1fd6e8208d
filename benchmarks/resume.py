"""From a restart to the first step, at several positions of a pass: does it matter how far the run had come?

python benchmarks/resume.py                 10 M clips at 0, 25, 50, 75 and 99 % of a pass
python benchmarks/resume.py --mix           as many in two tables, the second one and a half times a pass
python benchmarks/resume.py --tiny          20,000 clips, to see that it runs

Every line is a process of its own that opens the clip tables (as shards, which tables above 256 MB are converted to
once), reads the data position out of a checkpoint's run.json, plans the rest of the pass or reads it where it is kept
beside the table, and names the clips of the first step: all that a restart does with the clips before it fetches
one. (Weights and processes are not in it: they know nothing of the position.) Of several restarts at a
position, in turns, the least time of each part counts. Processor time stands beside it: on a machine that others use,
the clock tells how busy they were.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from bucket_tables import bucket_rule, clip_columns
from machine import print_table, write_json

from longtake.buckets.inputs import OrderInputs
from longtake.buckets.kept_orders import plan_kept
from longtake.buckets.order import PassOrder
from longtake.checkpoint.folder import read_state
from longtake.checkpoint.save import save_checkpoint
from longtake.data.config import DatasetConfig
from longtake.data.tables.mix import open_clips, order_columns

SHARES = (0.0, 0.25, 0.5, 0.75, 0.99)
TARGET = 1.25  # slowest over the start of the pass
TARGET_SECONDS = 1.0  # of planning, where the order is kept
SLOTS = 64
PARTS = ("open", "plan", "first_step")


def main() -> None:
    """Measures every position and prints one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=float, default=1e7, help="clips")
    parser.add_argument("--repeats", type=int, default=5, help="restarts at each position, in turns; the least counts")
    parser.add_argument("--mix", action="store_true", help="half of the clips in a second table, with weight 1.5")
    parser.add_argument("--tiny", action="store_true", help="20,000 clips, one restart")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--one", nargs=3, metavar=("TABLE", "CHECKPOINT", "KEPT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        table, checkpoint, kept = arguments.one
        print(json.dumps(restart(Path(table), Path(checkpoint), kept == "True")))
        return
    rows, repeats = (20_000, 1) if arguments.tiny else (int(arguments.rows), arguments.repeats)
    with tempfile.TemporaryDirectory() as place:
        figures = measure(Path(place), rows, repeats, arguments.mix)
    head = ("clips", "order", "position", "step", "open s", "plan s", "first step s", "together s", "processor s")
    print_table(head, [_row(rows, line) for line in figures])
    facts = {"tiny": arguments.tiny, "clips": rows, "mix": arguments.mix, "repeats": repeats}
    for kept in (False, True):
        lines = [line for line in figures if line["kept"] == kept]
        ratio, busy = (max(line[name] for line in lines) / lines[0][name] for name in ("seconds", "cpu_seconds"))
        plan, name = max(line["plan"] for line in lines), _name(kept)
        print(
            f"{name}: slowest over the start {ratio:.2f}, by processor time {busy:.2f} (target <= {TARGET}); "
            f"the order in at most {plan:.2f} s" + f" (target <= {TARGET_SECONDS})" * kept
        )
        facts[name] = {"ratio": ratio, "cpu_ratio": busy, "plan": plan}
    write_json(arguments.json, "resume", {**facts, "runs": figures})


def measure(place: Path, rows: int, repeats: int, mix: bool = False) -> list[dict[str, Any]]:
    """The restart at each position, of every part the least time that was seen."""
    table = place / "clips.parquet"
    columns, first = clip_columns(rows), rows // (1 + mix)
    write_table(table, {name: column[:first] for name, column in columns.items()})
    if mix:
        write_table(_second(table), {name: column[first:] for name, column in columns.items()})
    order = plan_kept(_inputs(table), 0, None, table, print)
    checkpoints = []
    for share in SHARES:
        step = int(share * order.num_steps)
        state = {"data": order.state(step) if step else None}
        checkpoints.append((share, step, save_checkpoint(place / "run", 0, step, {"model.w": torch.ones(1)}, state)))
    del order
    least: dict[tuple[bool, int], dict[str, float]] = {}
    turns = [(kept, step, checkpoint) for kept in (False, True) for _, step, checkpoint in checkpoints]
    for kept, step, checkpoint in turns * repeats:
        command = [sys.executable, __file__, "--one", str(table), str(checkpoint), str(kept)]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        before = least.get((kept, step), found)
        least[kept, step] = {part: min(seconds, before[part]) for part, seconds in found.items()}
    for parts in least.values():
        parts["seconds"] = sum(parts[name] for name in PARTS)
    return [
        {"kept": kept, "share": share, "step": step, **least[kept, step]}
        for kept in (False, True)
        for share, step, _ in checkpoints
    ]


def restart(table: Path, checkpoint: Path, kept: bool) -> dict[str, float]:
    """Seconds of one restart, by part, and processor time of all of it."""
    marks, before = [time.perf_counter()], time.process_time()
    position = read_state(checkpoint)["data"]
    inputs = _inputs(table)
    marks.append(time.perf_counter())
    order = plan_kept(inputs, 0, position, table if kept else None, print)
    marks.append(time.perf_counter())
    assert _first_step(order)
    marks.append(time.perf_counter())
    parts = dict(zip(PARTS, np.diff(marks).tolist(), strict=True))
    return {**parts, "cpu_seconds": time.process_time() - before}


def write_table(path: Path, columns: dict[str, np.ndarray]) -> None:
    """A probed clip table of these columns."""
    count = len(columns["num_frames"])
    height, width = columns["height"].astype(np.int32), columns["width"].astype(np.int32)
    numbers = {
        "num_frames": columns["num_frames"].astype(np.int32),
        "height": height,
        "width": width,
        "aspect_ratio": height / width,
        "resolution": height.astype(np.int64) * width,
        "fps": columns["fps"].astype(np.float32),
        "clip_id": columns["clip_ids"],
    }
    paths = pa.array(np.char.add("clips/", np.arange(count).astype("U9")).tolist())
    captions = pa.DictionaryArray.from_arrays(np.zeros(count, np.int32), ["a clip"]).cast(pa.string())
    pq.write_table(pa.table({"path": paths, "text": captions, **numbers}), path)


def _second(table: Path) -> Path:
    return table.with_stem("more")


def _inputs(path: Path) -> OrderInputs:
    mix = ((str(path), 1.0), (str(_second(path)), 1.5)) if _second(path).exists() else None
    table = open_clips(DatasetConfig(data_path=None if mix else str(path), mix=mix, memory_efficient=True))
    return OrderInputs(
        seed=1,
        stage=0,
        slots_per_step=SLOTS,
        rule=bucket_rule("stage1"),
        weights=table.weights,
        **order_columns(table),
    )


def _first_step(order: PassOrder) -> int:
    """Rows of the clips of the first step."""
    order.state(1)  # what the checkpoint behind it keeps
    return sum(len(slot.rows) for slot in order.step(0))


def _name(kept: bool) -> str:
    return "kept" if kept else "planned"


def _row(rows: int, line: dict[str, Any]) -> tuple[str, ...]:
    parts = (f"{line[name]:.2f}" for name in (*PARTS, "seconds", "cpu_seconds"))
    return (f"{rows:,}", _name(line["kept"]), f"{line['share']:.0%}", f"{line['step']:,}", *parts)


if __name__ == "__main__":
    main()
