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

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from longtake.buckets.assign import BucketRule
from longtake.buckets.balance import CostModel
from longtake.buckets.mix import fill_windows
from longtake.buckets.report import BucketReport, make_report
from longtake.buckets.sweep import Era, Sweep, sort_samples
from longtake.contracts import Slot, UserError
from longtake.random import Purpose, hash64, mixed, sample_ids, uniforms

STATE_FORMAT = 1
_ROWS_AT_ONCE = 1 << 20
_FACTORS = tuple(
    map(np.uint64, (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93))
)  # odd
_BLOCK = 1 << 16  # slots between two counts of what has been taken: any position is reached in one block


@dataclass(frozen=True, eq=False)
class OrderInputs:
    """All that the order of a pass depends on, besides the pass number and the state."""

    seed: int
    stage: int
    slots_per_step: int  # G
    rule: BucketRule
    num_frames: np.ndarray  # [N] columns of the clip table, any number type; NaN where unknown
    height: np.ndarray
    width: np.ndarray
    fps: np.ndarray
    clip_ids: np.ndarray  # uint64 [N], all different
    table: str  # fingerprint of the table's rows: equal exactly where the columns above are equal
    weights: float | np.ndarray = 1.0  # of each clip in the mix: expected number of copies per pass
    quarantined: Mapping[int, int] = field(default_factory=dict)  # sample id -> pass in which it failed to load
    views: int = 0  # K: bucket draws use pass mod K; 0 for a new draw in every pass
    window_steps: int = 64  # the mix of buckets is proportional within windows of this many steps
    cost: CostModel | None = None  # slots that run side by side cost nearly the same; None: they are filled at random
    slot_sizes: Mapping[tuple[str, int], int] = field(default_factory=dict)
    # entry of bucket_config -> micro-batches of one slot; 1 where it is not named

    def __post_init__(self) -> None:
        for name in ("num_frames", "height", "width", "fps"):
            if len(getattr(self, name)) != len(self.clip_ids):
                raise ValueError(f"{name} has {len(getattr(self, name))} rows, clip_ids has {len(self.clip_ids)}")
        if self.slots_per_step < 1 or self.window_steps < 1 or self.views < 0:
            raise ValueError("slots_per_step and window_steps must be at least 1, views at least 0")
        if min(self.slot_sizes.values(), default=1) < 1:
            raise ValueError(f"slot_sizes {dict(self.slot_sizes)}: a slot has at least one micro-batch")
        if self.cost is not None and self.slots_per_step % self.cost.side_by_side:
            raise ValueError(f"side_by_side = {self.cost.side_by_side} does not divide {self.slots_per_step} slots")
        weights = np.asarray(self.weights, np.float64)
        if weights.ndim and weights.shape != (self.num_clips,):
            raise ValueError(f"weights has shape {weights.shape}: one number or one for each of {self.num_clips} clips")
        if not (np.isfinite(weights).all() and (weights >= 0).all()):
            raise UserError("dataset: mix weights must be finite numbers of at least 0")
        if weights.size and not weights.any():
            raise UserError("dataset: every mix weight is 0; give at least one clip a weight above 0")

    @property
    def num_clips(self) -> int:
        return len(self.clip_ids)

    @cached_property
    def micro_batches(self) -> np.ndarray:
        """Micro-batches of a slot of each bucket: int64 [B]."""
        buckets = self.rule.buckets
        return np.array([self.slot_sizes.get((b.resolution, b.num_frames), 1) for b in buckets], np.int64)

    @property
    def most_micro_batches(self) -> int:
        """The most that a step can have."""
        return self.slots_per_step * int(self.micro_batches.max(initial=1))

    @cached_property
    def clip_digests(self) -> tuple[str, str]:
        """Hashes of which clips there are, and of those with their numbers; the order of rows does not count."""
        which = what = 0
        columns = (self.num_frames, self.height, self.width, self.fps)
        for first in range(0, self.num_clips, _ROWS_AT_ONCE):
            rows = slice(first, first + _ROWS_AT_ONCE)
            hashes = mixed(np.asarray(self.clip_ids[rows], np.uint64))
            which += int(hashes.sum())  # wraps at 2**64, as any sum of these may
            for column, factor in zip(columns, _FACTORS, strict=True):
                numbers = np.nan_to_num(np.asarray(column[rows], np.float64)) + 0.0  # -0.0 becomes 0.0
                hashes = hashes + numbers.view(np.uint64) * factor
            what += int(mixed(hashes).sum())
        return f"{which % 2**64:016x}", f"{what % 2**64:016x}"

    def view(self, pass_index: int, views: int | None = None) -> int:
        """The pass number that bucket draws use."""
        views = self.views if views is None else views
        return pass_index % views if views else pass_index

    def fingerprint(self, pass_index: int) -> str:
        """A hash of everything that, changed in the middle of a pass, begins an era."""
        parts = [json.dumps(self.rule.to_json()), self.slots_per_step, self.window_steps, self.views, self.table]
        if self.cost is not None:
            parts.append(json.dumps(self.cost.to_json()))
        if (self.micro_batches > 1).any():
            parts.append(json.dumps(self.micro_batches.tolist()))
        weights = np.asarray(self.weights, np.float64).tobytes()
        absent = np.sort(self.quarantined_before(pass_index)).tobytes()
        return f"{hash64(*parts, self.num_clips, weights, absent):016x}"

    def quarantined_before(self, pass_index: int) -> np.ndarray:
        """uint64: the samples that failed in an earlier pass."""
        return np.array([sample for sample, failed in self.quarantined.items() if failed < pass_index], np.uint64)

    def samples(self, pass_index: int) -> tuple[np.ndarray | None, np.ndarray]:
        """The samples of a pass: `(rows, ids)`, int64 and uint64 [S], in table order.

        A clip of weight w has floor(w) copies, and one more where a uniform number of this pass falls below the
        rest. Where every clip has exactly one copy, `rows` is None: sample i is row i.
        """
        weights = np.asarray(self.weights, np.float64)
        if (weights == 1).all():
            return None, np.asarray(self.clip_ids, np.uint64)
        copies = np.broadcast_to(np.floor(weights), (self.num_clips,)).astype(np.int64)
        rest = weights - np.floor(weights)
        if rest.any():
            draws = uniforms(self.seed, self.stage, Purpose.COPY, pass_index, self.clip_ids, 1)[:, 0]
            copies = copies + (draws < rest)
        rows = np.repeat(np.arange(self.num_clips), copies)
        first = np.repeat(np.cumsum(copies) - copies, copies)
        return rows, sample_ids(np.asarray(self.clip_ids, np.uint64)[rows], np.arange(len(rows)) - first)


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
        """The micro-batches of a step, those of its 1..G slots one after the other, all real.

        `index` in 0..num_steps - 1. A bucket's last slot may have fewer than others.
        """
        if not 0 <= index < self.num_steps:
            raise IndexError(f"step {index}: {self.num_steps} are left in pass {self.pass_index}")
        first = self.position + index * self.inputs.slots_per_step
        taken = self._slots_before(first) * self.inputs.micro_batches
        slots = []
        for bucket in self.slot_bucket[first : first + self.inputs.slots_per_step].tolist():
            for _ in range(self.inputs.micro_batches[bucket]):
                if taken[bucket] < self._num_micro_batches[bucket]:
                    slots.append(self._slot(bucket, int(taken[bucket])))
                    taken[bucket] += 1
        return slots

    def state(self, index: int) -> dict[str, Any]:
        """The state after `index` further steps, 0..num_steps: plain data for `plan_pass`, fit for JSON."""
        slot = self._slot_after(index)
        window_slots = self.inputs.window_steps * self.inputs.slots_per_step
        windows = slot // window_slots
        state = _empty_state(self.inputs, self.pass_index, self._inputs_fingerprint)
        state["era"] = len(self.eras)
        state["window"] = self.window + windows
        state["slots"] = slot - windows * window_slots
        state["window_start"] = self._last_keys(windows * window_slots)
        state["last"] = self._last_keys(slot)
        state["eras"] = list(self.eras)
        return state

    def seek(self, index: int) -> PassOrder:
        """The order from `index` steps further on, as if they had been taken."""
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
    def _inputs_fingerprint(self) -> str:
        return self.inputs.fingerprint(self.pass_index)

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

    def _slot(self, number: int, micro_batch: int) -> Slot:
        """A micro-batch of bucket `number`, counted from the window in which the order begins."""
        bucket = self.inputs.rule.buckets[number]
        first = int(self.bounds[number]) + micro_batch * bucket.batch_size
        num_real = min(bucket.batch_size, int(self.bounds[number + 1]) - first)
        places = np.arange(bucket.batch_size)
        index = first + places % num_real
        samples = self.order[index].astype(np.int64)
        rows = samples if self.rows is None else self.rows[samples]
        weights = (places < num_real).astype(np.float32)
        return Slot(bucket, self.pass_index, rows, self.ids[samples], self.keys[index], weights)


def plan_pass(
    inputs: OrderInputs, pass_index: int, state: Mapping[str, Any] | None = None, num_threads: int | None = None
) -> PassOrder:
    """The order of a pass, from its start or from a state that `PassOrder.state` gave.

    With unchanged inputs the order goes on exactly where the state was, in the middle of a window too. With changed
    ones (rule, batch sizes, G, rows, weights, quarantine, window, views, cost, slot sizes) what is unseen is dealt
    anew.
    `num_threads`: None for one on each core this process may use, at most 8; the result does not depend on it. Raises
    UserError if no clip fits a bucket, clip ids repeat, the state is of another run, or the clips are those of the
    state with other numbers: a clip's bucket, and with it what was taken, follows from them.
    """
    state = _empty_state(inputs, pass_index) if state is None else _continue_state(inputs, pass_index, state)
    rows, ids = inputs.samples(pass_index)
    eras = tuple(
        Era(BucketRule.from_json(era["rule"]), inputs.view(pass_index, era["views"]), era["last"])
        for era in state["eras"]
    )
    found = sort_samples(
        Sweep(
            inputs.seed,
            inputs.stage,
            pass_index,
            inputs.view(pass_index),
            inputs.rule,
            (inputs.num_frames, inputs.height, inputs.width, inputs.fps),
            rows,
            ids,
            eras,
            np.sort(inputs.quarantined_before(pass_index)),
            state["window_start"],
        ),
        num_threads,
    )
    sizes = inputs.micro_batches
    report = make_report(pass_index, inputs.rule.buckets, found, rows, inputs.num_clips, inputs.slots_per_step, sizes)
    report.require_clips()
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
    return PassOrder(
        inputs,
        pass_index,
        report,
        tuple(state["eras"]),
        state["window"],
        dict(state["window_start"]),
        state["slots"],
        slot_bucket,
        found.bounds,
        found.keys,
        found.order,
        ids,
        rows,
    )


def next_pass(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state at the start of the pass after the one that `state` belongs to."""
    fresh = {"pass": state["pass"] + 1, "era": 0, "window": 0, "slots": 0, "window_start": {}, "last": {}, "eras": []}
    return {**state, **fresh}


def _empty_state(inputs: OrderInputs, pass_index: int, fingerprint: str | None = None) -> dict[str, Any]:
    return {
        "format": STATE_FORMAT,
        "seed": inputs.seed,
        "stage": inputs.stage,
        "pass": pass_index,
        "era": 0,
        "window": 0,
        "slots": 0,
        "window_start": {},
        "last": {},
        "eras": [],
        "rule": inputs.rule.to_json(),
        "views": inputs.views,
        "cost": None if inputs.cost is None else inputs.cost.to_json(),
        "inputs": fingerprint or inputs.fingerprint(pass_index),
        "clips": list(inputs.clip_digests),
    }


def _continue_state(inputs: OrderInputs, pass_index: int, state: Mapping[str, Any]) -> dict[str, Any]:
    """The state itself where the inputs are its own; else the state at the start of a new era."""
    if state.get("format") != STATE_FORMAT:
        raise UserError(f"order state: format {state.get('format')} was found, format {STATE_FORMAT} is read here")
    for name, present in (("seed", inputs.seed), ("stage", inputs.stage), ("pass", pass_index)):
        if state[name] != present:
            raise UserError(
                f"order state: {name} is {present}, but the state was written with {state[name]}; keep it within a"
                " pass, or begin a new pass"
            )
    fresh = _empty_state(inputs, pass_index)
    if state["inputs"] == fresh["inputs"]:
        return dict(state)
    taken = bool(state["last"] or state["eras"])
    (which, what), (which_now, what_now) = state.get("clips", ("", "")), inputs.clip_digests
    if taken and which == which_now and what != what_now:
        raise UserError(
            f"order state: frames, size or rate of some clips have changed in the middle of pass {pass_index}, so what"
            " of them was trained cannot be told; finish the pass with the table it began with, or deal it anew with"
            f" --start-epoch {pass_index}"
        )
    finished = {"rule": state["rule"], "views": state["views"], "last": dict(state["last"])}
    fresh["eras"] = [*state["eras"], finished] if finished["last"] else list(state["eras"])
    fresh["era"] = len(fresh["eras"])
    return fresh
