"""Orders of passes kept on disk beside the clip table, so that a restart reads one and plans nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from glob import escape
from pathlib import Path
from typing import Any

import numpy as np

from longtake._version import __version__
from longtake.buckets.inputs import OrderInputs
from longtake.buckets.order import PassOrder, plan_from, plan_pass, settled_state
from longtake.buckets.protocol import Unused
from longtake.buckets.report import BucketCount, BucketReport, UnusedCount
from longtake.durable import unfinished
from longtake.random import hash64

FORMAT = 1
MOST_KEPT = 4  # orders beside one table; a new one takes the place of the oldest
WORTH_KEEPING = 1_000_000  # clips; fewer are planned in the time that a file takes
_ARRAYS = ("slot_bucket", "bounds", "keys", "order")
_COPIES = ("ids", "rows")  # where some clip has not exactly one copy
_COUNTS = ("num_clips", "num_used", "num_steps", "frames_cut", "area_cut")


def plan_kept(
    inputs: OrderInputs,
    pass_index: int,
    state: Mapping[str, Any] | None,
    table: Path | None,
    say: Callable[[str], None],
) -> PassOrder:
    """`plan_pass` by way of a file beside `table`, the clip table's file: the order of the whole pass, or of the era
    that a change of settings began in it, whatever position `state` has.

    A file is used only where everything that the order follows from is what it was and its checksums are right. Where
    none can be written `say` gets a line. A small table has none.
    """
    if table is None or inputs.num_clips < WORTH_KEEPING:
        return plan_pass(inputs, pass_index, state)
    state = settled_state(inputs, pass_index, state)
    start = dict(state) | {"window": 0, "slots": 0, "window_start": {}, "last": {}}
    key = [FORMAT, __version__, *(start[name] for name in ("inputs", "seed", "stage", "pass", "eras"))]
    path = table.with_name(f".{table.name}.{hash64(json.dumps(key)):016x}.order.npz")
    order = _read(path, key, inputs, start)
    if order is None:
        order = plan_from(inputs, pass_index, start)
        try:
            _write(path, key, order)
            _remove_oldest(table)
        except OSError as error:
            say(f"{path.parent}: the order of pass {pass_index} cannot be kept there ({error.strerror or error})")
    window_slots = inputs.window_steps * inputs.slots_per_step
    return replace(order, position=state["window"] * window_slots + state["slots"])


def _write(path: Path, key: Sequence[Any], order: PassOrder) -> None:
    head = {"key": key, "clips": order.inputs.clip_digests, "report": _plain(order)}
    names = _ARRAYS if order.rows is None else _ARRAYS + _COPIES
    with unfinished(path, synced=False) as partial:
        np.savez(partial, head=json.dumps(head), **{name: getattr(order, name) for name in names})


def _read(path: Path, key: Sequence[Any], inputs: OrderInputs, start: dict[str, Any]) -> PassOrder | None:
    """None where there is no such file, or a damaged one."""
    try:
        with np.load(path, allow_pickle=False) as file:  # which compares checksums
            head = json.loads(str(file["head"]))
            if head["key"] != json.loads(json.dumps(key)):
                return None
            arrays = {name: file[name] for name in file.files if name != "head"}
            report = _report(head["report"], inputs, start["pass"])
        samples = {"ids": np.asarray(inputs.clip_ids, np.uint64), "rows": None} | arrays
        order = PassOrder(inputs, start["pass"], report, tuple(start["eras"]), 0, {}, 0, **samples)
        inputs.know_digests(head["clips"])
    except Exception:  # of a damaged archive come many kinds
        return None
    return order


def _remove_oldest(table: Path) -> None:
    files = table.parent.glob(f".{escape(table.name)}.*.order.npz")
    for old in sorted(files, key=lambda file: file.stat().st_mtime)[:-MOST_KEPT]:
        old.unlink(missing_ok=True)


def _plain(order: PassOrder) -> dict[str, Any]:
    """Return the report, fit for JSON."""
    report, buckets = order.report, {bucket: i for i, bucket in enumerate(order.inputs.rule.buckets)}
    lines = [
        [buckets[line.bucket], *(getattr(line, each.name) for each in fields(line)[1:])] for line in report.buckets
    ]
    unused = [[int(line.reason), line.clips, line.rows] for line in report.unused]
    return {name: getattr(report, name) for name in _COUNTS} | {"buckets": lines, "unused": unused}


def _report(plain: Mapping[str, Any], inputs: OrderInputs, pass_index: int) -> BucketReport:
    lines = tuple(BucketCount(inputs.rule.buckets[line[0]], *line[1:]) for line in plain["buckets"])
    unused = tuple(UnusedCount(Unused(reason), clips, tuple(rows)) for reason, clips, rows in plain["unused"])
    return BucketReport(pass_index, buckets=lines, unused=unused, **{name: plain[name] for name in _COUNTS})
