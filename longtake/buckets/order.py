"""The order of a pass: which samples each step trains on, and the state from which it goes on.

Everything here is a pure function of the inputs, the pass number and the state; nothing remembers how far it has
been read. A bucket runs its samples by ascending key in micro-batches of its batch size; the last one is filled up
with weight-0 copies. Slots take micro-batches from buckets as `mix` decides; a step takes G slots. A slot is one
micro-batch, or several of one bucket where those run side by side at a smaller sequence degree.

The state is a plain dict: the last key taken in each bucket, now and at the start of the present window. Where an
input changes in the middle of a pass an *era* ends: its rule and last keys are kept, and what it has not reached is
dealt anew. A sample has been passed if its key is at most the last key of the bucket it had in any era.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from longtake.buckets.assignment import read_law
from longtake.buckets.inputs import OrderInputs
from longtake.buckets.mix import fill_windows
from longtake.buckets.position import check_position
from longtake.buckets.protocol import view_of
from longtake.buckets.report import BucketReport, make_report
from longtake.buckets.sweep import Era, Sweep, sort_samples
from longtake.contracts import Slot, UserError
from longtake.durable import naming

STATE_FORMAT = 1
# In files, an order is planned by one process of a machine and read by the others through memory maps.
_ARRAYS = ("slot_bucket", "keys", "order")
_COPIES = ("ids", "rows")  # present where some clip has not exactly one copy
_SMALL = ("pass_index", "report", "eras", "window", "window_start", "position", "bounds")
_BLOCK = 1 << 16  # slots between two counts of what has been taken: any position is reached in one block


@dataclass(frozen=True, eq=False)
class PassOrder:
    """The rest of a pass, from a state on. Steps are counted from that state; any of them can be asked for."""

    inputs: OrderInputs
    pass_index: int
    report: BucketReport  # of the whole era, wherever in it the state is
    eras: tuple[dict[str, Any], ...]  # finished ones
    window: int  # the window in which the order begins
    window_start: dict[str, int]  # bucket name -> last key before that window
    position: int  # slots of that window taken already
    slot_bucket: np.ndarray  # int32 [M], the bucket of each slot from the window's start
    bounds: np.ndarray  # int64 [B + 1], where each bucket's samples begin in the arrays below
    keys: np.ndarray  # uint64, by bucket, ascending within it
    order: np.ndarray  # their numbers among the samples
    ids: np.ndarray  # uint64 [S], sample ids
    rows: np.ndarray | None  # int64 [S], rows of the samples; None: sample i is row i

    @property
    def num_slots(self) -> int:
        """Slots left in the pass."""
        return len(self.slot_bucket) - self.position

    @property
    def num_steps(self) -> int:
        """Steps left in the pass; only the last one may have fewer than G slots."""
        return -(-self.num_slots // self.inputs.slots_per_step)

    @property
    def num_samples(self) -> int:
        """Samples left in the pass."""
        taken = np.minimum(self._slots_before(self.position) * self._slot_samples, np.diff(self.bounds))
        return len(self.keys) - int(taken.sum())

    def step(self, index: int) -> list[Slot]:
        """Return the micro-batches of a step, those of its 1..G slots one after the other, all real.

        `index` in 0..num_steps - 1. A bucket's last slot may have fewer than others.
        """
        if not 0 <= index < self.num_steps:
            raise IndexError(f"step {index}: {self.num_steps} are left in pass {self.pass_index}")
        first = self.position + index * self.inputs.slots_per_step
        taken = self._slots_before(first) * self.inputs.micro_batches
        buckets = self.slot_bucket[first : first + self.inputs.slots_per_step].tolist()
        slots = []
        for number, bucket in enumerate(buckets):
            for _ in range(self.inputs.micro_batches[bucket]):
                if taken[bucket] < self._num_micro_batches[bucket]:
                    slots.append(self._slot(bucket, int(taken[bucket]), (number, len(buckets))))
                    taken[bucket] += 1
        return slots

    def state(self, index: int) -> dict[str, Any]:
        """Return the state after `index` further steps, 0..num_steps: plain data for `plan_pass`, fit for JSON."""
        slot = self._slot_after(index)
        window_slots = self.inputs.window_steps * self.inputs.slots_per_step
        windows = slot // window_slots
        return _empty_state(self.inputs, self.pass_index) | {
            "era": len(self.eras),
            "window": self.window + windows,
            "slots": slot - windows * window_slots,
            "window_start": self._last_keys(windows * window_slots),
            "last": self._last_keys(slot),
            "eras": list(self.eras),
        }

    def seek(self, index: int) -> PassOrder:
        """Return the order from `index` steps further on, as if they had been taken."""
        return replace(self, position=self._slot_after(index))

    @cached_property
    def _batch_sizes(self) -> np.ndarray:
        return np.array([bucket.batch_size for bucket in self.inputs.rule.buckets])

    @cached_property
    def _slot_samples(self) -> np.ndarray:
        """int64 [B]: samples of a whole slot."""
        return self._batch_sizes * self.inputs.micro_batches

    @cached_property
    def _num_micro_batches(self) -> np.ndarray:
        """int64 [B]: micro-batches of each bucket from the window's start."""
        return -(-np.diff(self.bounds) // self._batch_sizes)

    @cached_property
    def _taken_by_block(self) -> np.ndarray:
        """int64 [M // block + 1, B]: slots of each bucket before each block of slots."""
        num_buckets = len(self._batch_sizes)
        starts = range(0, len(self.slot_bucket) - _BLOCK + 1, _BLOCK)
        counts = [np.bincount(self.slot_bucket[start : start + _BLOCK], minlength=num_buckets) for start in starts]
        return np.cumsum([np.zeros(num_buckets, np.int64), *counts], axis=0)

    def _slot_after(self, index: int) -> int:
        if not 0 <= index <= self.num_steps:
            raise IndexError(f"step {index}: {self.num_steps} are left in pass {self.pass_index}")
        return min(self.position + index * self.inputs.slots_per_step, len(self.slot_bucket))

    def _slots_before(self, slot: int) -> np.ndarray:
        """int64 [B]: slots of each bucket before `slot`."""
        block = slot // _BLOCK
        rest = self.slot_bucket[block * _BLOCK : slot]
        return self._taken_by_block[block] + np.bincount(rest, minlength=len(self._batch_sizes))

    def _last_keys(self, slot: int) -> dict[str, int]:
        """Bucket name -> last key taken in this era before a slot; untouched buckets are absent."""
        taken = self._slots_before(slot)
        buckets = np.flatnonzero(taken)
        ends = np.minimum(self.bounds[buckets] + taken[buckets] * self._slot_samples[buckets], self.bounds[buckets + 1])
        names = [self.inputs.rule.buckets[index].name for index in buckets]
        return self.window_start | dict(zip(names, self.keys[ends - 1].tolist(), strict=True))

    def _slot(self, index: int, micro_batch: int, place: tuple[int, int]) -> Slot:
        """Return a micro-batch of bucket `index`; `place`: the number of its slot in the step, and how many slots that
        has."""
        bucket = self.inputs.rule.buckets[index]
        first = int(self.bounds[index]) + micro_batch * bucket.batch_size
        num_real = min(bucket.batch_size, int(self.bounds[index + 1]) - first)
        places = np.arange(bucket.batch_size)
        taken = first + places % num_real
        samples = self.order[taken].astype(np.int64)
        rows = samples if self.rows is None else self.rows[samples]
        weights = (places < num_real).astype(np.float32)
        return Slot(bucket, self.pass_index, rows, self.ids[samples], self.keys[taken], weights, *place)


def plan_pass(inputs: OrderInputs, pass_index: int, state: Mapping[str, Any] | None = None) -> PassOrder:
    """Return the order of a pass, from its start or from a state that `PassOrder.state` gave.

    With unchanged inputs the order goes on exactly where the state was, in the middle of a window too. With changed
    ones (rule, batch sizes, G, rows, weights, quarantine, window, views, cost, slot sizes) what is unseen is dealt
    anew. Raises UserError if no clip fits a bucket, clip ids repeat, the state is of another run, or the clips are
    those of the state with other numbers: a clip's bucket, and with it what was taken, follows from them.
    """
    return plan_from(inputs, pass_index, settled_state(inputs, pass_index, state))


def settled_state(inputs: OrderInputs, pass_index: int, state: Mapping[str, Any] | None) -> dict[str, Any]:
    """Where an order begins: the state, or the start of the pass, or that of a new era. Raises as `plan_pass`."""
    return _beginning(inputs, pass_index) if state is None else _continue_state(inputs, pass_index, state)


def plan_from(inputs: OrderInputs, pass_index: int, state: Mapping[str, Any]) -> PassOrder:
    """Return the order from a state that is of these inputs."""
    rows, ids = inputs.samples(pass_index)
    eras = tuple(Era(read_law(era["rule"]), view_of(pass_index, era["views"]), era["last"]) for era in state["eras"])
    found = sort_samples(Sweep(inputs, pass_index, rows, ids, eras, state["window_start"]))
    sizes = inputs.micro_batches
    report = make_report(inputs, pass_index, found, rows)
    report.require_clips(inputs.rule.place)
    slot_samples = np.array([bucket.batch_size for bucket in inputs.rule.buckets]) * sizes
    slot_bucket = fill_windows(
        -(-np.diff(found.bounds) // slot_samples),
        inputs.window_steps * inputs.slots_per_step,
        seed=inputs.seed,
        stage=inputs.stage,
        pass_index=pass_index,
        era=len(state["eras"]),
        first_window=state["window"],
        costs=None if inputs.cost is None else inputs.cost.costs(inputs.rule.buckets) * sizes,
        side_by_side=1 if inputs.cost is None else inputs.cost.side_by_side,
    )
    if state["slots"] > len(slot_bucket):
        raise UserError(
            f"order state: slots = {state['slots']}, but {len(slot_bucket)} are left from the start of its window; the "
            "checkpoint is damaged, choose another one"
        )
    place = tuple(state["eras"]), state["window"], dict(state["window_start"]), state["slots"]
    samples = found.bounds, found.keys, found.order, ids, rows
    return PassOrder(inputs, pass_index, report, *place, slot_bucket, *samples)


def _empty_state(inputs: OrderInputs, pass_index: int) -> dict[str, Any]:
    return _beginning(inputs, pass_index) | {"clips": list(inputs.clip_digests)}


def _beginning(inputs: OrderInputs, pass_index: int) -> dict[str, Any]:
    """Return an empty state without the digests of all clips, which only a state that is written needs."""
    return {
        "format": STATE_FORMAT,
        "seed": inputs.seed,
        "stage": inputs.stage,
        "pass": pass_index,
        **{"era": 0, "window": 0, "slots": 0, "window_start": {}, "last": {}, "eras": []},  # nothing is taken
        "rule": inputs.rule.to_json(),
        "views": inputs.views,
        "cost": None if inputs.cost is None else inputs.cost.to_json(),
        "inputs": inputs.fingerprint(pass_index),
    }


def _continue_state(inputs: OrderInputs, pass_index: int, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state itself where the inputs are its own; else the state at the start of a new era."""
    if state.get("format") != STATE_FORMAT:
        raise UserError(f"order state: format {state.get('format')} was found, format {STATE_FORMAT} is read here")
    check_position(state)
    for name, present in (("seed", inputs.seed), ("stage", inputs.stage), ("pass", pass_index)):
        if state[name] != present:
            raise UserError(
                f"order state: {name} is {present}, but the state was written with {state[name]}; keep it within a"
                " pass, or begin a new pass"
            )
    if state["inputs"] == inputs.fingerprint(pass_index):
        inputs.know_digests(state.get("clips"))
        return dict(state)
    fresh = _empty_state(inputs, pass_index)
    taken = bool(state["last"] or state["eras"])
    (which, what), (which_now, what_now) = state.get("clips", ("", "")), inputs.clip_digests
    if taken and which == which_now and what != what_now:
        raise UserError(
            f"order state: frames, size or rate of some clips have changed in the middle of pass {pass_index}, so what"
            " of them was trained cannot be known; finish the pass with the table it began with, or deal it anew with"
            f" --start-epoch {pass_index}"
        )
    finished = {"rule": state["rule"], "views": state["views"], "last": dict(state["last"])}
    fresh["eras"] = [*state["eras"], finished] if finished["last"] else list(state["eras"])
    fresh["era"] = len(fresh["eras"])
    return fresh


def write_order(order: PassOrder, folder: Path) -> None:
    """Write the arrays of an order into an existing folder: about 13 bytes a sample (29 where clips have copies)."""
    names = _ARRAYS if order.rows is None else _ARRAYS + _COPIES
    for name in names:
        path, array = folder / f"{name}.npy", np.ascontiguousarray(getattr(order, name))
        with naming(path), path.open("wb") as file:
            np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
            if array.size:  # not NumPy's own writing, whose error of a full disk says neither that nor where
                file.write(array.data.cast("B"))


def order_summary(order: PassOrder) -> dict[str, Any]:
    """Everything else of an order, small and fit to be sent to other processes."""
    return {name: getattr(order, name) for name in _SMALL} | {"copies": order.rows is not None}


def open_order(inputs: OrderInputs, summary: Mapping[str, Any], folder: Path) -> PassOrder:
    """Return the order that `write_order` and `order_summary` describe; its arrays stay on disk, shared by all readers.

    `inputs`: those the order was planned from. The files may be removed once every process has opened them.
    """
    arrays = {name: _mapped(folder / f"{name}.npy") for name in _ARRAYS + _COPIES * summary["copies"]}
    if not summary["copies"]:
        arrays |= {"ids": np.asarray(inputs.clip_ids, np.uint64), "rows": None}
    return PassOrder(inputs, **{name: summary[name] for name in _SMALL}, **arrays)


def _mapped(path: Path) -> np.ndarray:
    """Return an array read page by page; one without entries cannot be mapped and is read whole."""
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError:
        return np.load(path, allow_pickle=False)
