"""The samples of a pass, put into their buckets and sorted: one sweep over the table in chunks, on several threads.

NumPy lets other threads run while it works on a chunk, so threads of one process share the columns without a copy.
The result does not depend on their number.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from longtake.buckets.inputs import OrderInputs
from longtake.buckets.protocol import BucketLaw, Unused, keyed_draw, view_of
from longtake.contracts import UserError
from longtake.random import available_cores, sample_keys

_CHUNK = 1 << 17  # samples per piece of work: its columns stay in the cache
_MAX_THREADS = 8


@dataclass(frozen=True)
class Era:
    """Settings under which a part of the pass was taken, and how far each bucket had come when they ended."""

    rule: BucketLaw
    view: int  # pass number of the bucket draws
    last: Mapping[str, int]  # bucket name -> last key taken


@dataclass(frozen=True)
class Sweep:
    """What decides where a sample goes in a pass."""

    inputs: OrderInputs
    pass_index: int
    rows: np.ndarray | None  # int64 [S], rows of the samples; None: sample i is row i
    ids: np.ndarray  # uint64 [S]
    eras: tuple[Era, ...]  # samples that one of them has passed are left out
    window_start: Mapping[str, int]  # bucket name -> last key of the present era that is done with


@dataclass(frozen=True)
class Sorted:
    """The samples of a pass by bucket, and what was counted on the way."""

    codes: np.ndarray  # [S], a bucket or an `Unused` reason
    samples: np.ndarray  # int64 [B], samples of each bucket, whole era
    order: np.ndarray  # uint32 or int64 [n], numbers of the samples by bucket, then key, then id
    keys: np.ndarray  # uint64 [n], their keys
    bounds: np.ndarray  # int64 [B + 1], where each bucket begins in the two above; they hold what is still to come
    source_frames: np.ndarray  # float64 [B], frames of the clips of each bucket, whole era
    used_frames: np.ndarray  # float64 [B], those within the training windows
    kept_area: np.ndarray  # float64 [B], sum over the samples of the share of the picture that the crop keeps


def sort_samples(sweep: Sweep) -> Sorted:
    """Every sample's bucket, and the samples of each bucket by ascending key. Raises UserError if an id repeats."""
    ids, absent = sweep.ids, np.sort(sweep.inputs.quarantined_before(sweep.pass_index))
    num_samples, num_buckets = len(ids), len(sweep.inputs.rule.shapes)  # tables are made here, before the threads
    codes = np.empty(num_samples, np.int16 if num_buckets < 1 << 15 else np.int32)
    starts = range(0, num_samples, _CHUNK)
    with ThreadPoolExecutor(min(_MAX_THREADS, available_cores()), "order") as pool:
        chunks = (slice(start, min(start + _CHUNK, num_samples)) for start in starts)
        pieces = list(pool.map(lambda chunk: _sort_chunk(sweep, chunk, absent, codes), chunks))
        counts = np.array([piece.counts for piece in pieces], np.int64).reshape(-1, num_buckets)
        totals = counts.sum(axis=0)
        bounds = np.concatenate([[0], np.cumsum(totals)])
        places = bounds[:-1] + np.cumsum(counts, axis=0) - counts
        order = np.empty(bounds[-1], np.uint32 if num_samples < 1 << 32 else np.int64)
        keys = np.empty(bounds[-1], np.uint64)
        sums = sum((piece.sums for piece in pieces), np.zeros((4, num_buckets)))
        list(pool.map(lambda *chunk: _place_chunk(*chunk, order, keys), pieces, places, starts))
        largest_first = np.argsort(-totals, kind="stable")[: np.count_nonzero(totals)]
        list(pool.map(lambda b: _sort_bucket(order, keys, ids, bounds[b], bounds[b + 1]), largest_first))
    return Sorted(codes, sums[0].astype(np.int64), order, keys, bounds, *sums[1:])


def passed(rule: BucketLaw, last: Mapping[str, int], codes: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """bool [S]: samples whose key is at most the last one taken in their bucket. `codes` are those of `rule`."""
    # One more entry, for the negative codes of samples without a bucket, which index from the end.
    touched = np.zeros(len(rule.buckets) + 1, bool)
    last_key = np.zeros(len(rule.buckets) + 1, np.uint64)
    for index, bucket in enumerate(rule.buckets):
        if bucket.name in last:
            touched[index], last_key[index] = True, last[bucket.name]
    place = np.maximum(codes, -1)
    return touched[place] & (keys <= last_key[place])


@dataclass
class _SortedChunk:
    """A chunk whose samples are by bucket, not yet by key. Its arrays are given up once they have been placed."""

    counts: np.ndarray  # int64 [B]
    sums: np.ndarray  # float64 [4, B]: samples, source frames, used frames, kept area
    order: np.ndarray | None  # uint32 [n], samples counted from the start of the chunk
    keys: np.ndarray | None  # uint64 [n]


def _sort_chunk(sweep: Sweep, chunk: slice, absent: np.ndarray, codes: np.ndarray) -> _SortedChunk:
    """Assign the samples of a chunk, write their codes, and bring those still to be trained on in bucket order.

    `absent`: uint64, ascending: ids of the samples in quarantine.
    """
    ids = sweep.ids[chunk]
    rows = chunk if sweep.rows is None else sweep.rows[chunk]
    inputs, own_rule, own_view = sweep.inputs, sweep.inputs.rule, view_of(sweep.pass_index, sweep.inputs.views)
    columns = tuple(np.asarray(column[rows], np.float64) for column in inputs.columns)
    keys = sample_keys(inputs.seed, inputs.stage, sweep.pass_index, ids)

    def codes_under(rule: BucketLaw, view: int) -> tuple[np.ndarray, np.ndarray]:
        return rule.assign_chunk(columns, keyed_draw(inputs.seed, inputs.stage, view, ids))

    code, interval = codes_under(own_rule, own_view)
    now = code
    for era in sweep.eras:
        then = now if (era.rule, era.view) == (own_rule, own_view) else codes_under(era.rule, era.view)[0]
        code = np.where(passed(era.rule, era.last, then, keys), np.int32(Unused.SEEN), code)
    if len(absent):
        place = np.minimum(np.searchsorted(absent, ids), len(absent) - 1)
        code[absent[place] == ids] = Unused.QUARANTINED
    codes[chunk] = code
    by_bucket = _by_bucket(code)
    sums = _trimmed(own_rule, code[by_bucket], *(column[by_bucket] for column in (*columns[:3], interval)))
    if sweep.window_start:
        by_bucket = by_bucket[~passed(own_rule, sweep.window_start, code, keys)[by_bucket]]
    counts = np.bincount(code[by_bucket], minlength=len(own_rule.buckets))
    return _SortedChunk(counts, sums, by_bucket.astype(np.uint32), keys[by_bucket])


def _by_bucket(code: np.ndarray) -> np.ndarray:
    """int64: the samples that have a bucket, by bucket, then as they come."""
    if len(code) and code.max() >= 1 << 15:
        order = np.argsort(code, kind="stable")
    else:
        order = np.argsort(code.astype(np.int16), kind="stable")  # 16 bits: a radix sort
    return order[np.count_nonzero(code < 0) :]


def _trimmed(rule: BucketLaw, code: np.ndarray, *columns: np.ndarray) -> np.ndarray:
    """float64 [4, B]: samples, frames of the clips, frames in the windows, shares of the pictures kept, by bucket.

    `columns`: num_frames, height, width, interval.
    """
    (num_frames, height, width, interval), shapes = columns, rule.shapes
    used = np.minimum(shapes[code, 0] * interval, num_frames)
    ratio = height / width * (shapes[code, 2] / shapes[code, 1])
    kept = np.minimum(ratio, 1 / ratio) if rule.crops else np.ones_like(ratio)
    sums = [num_frames, used, kept]
    return np.stack([np.bincount(code, values, len(shapes)) for values in (None, *sums)])


def _place_chunk(piece: _SortedChunk, places: np.ndarray, start: int, order: np.ndarray, keys: np.ndarray) -> None:
    """Copy a chunk into its place in every bucket: `places` int64 [B]."""
    before = np.cumsum(piece.counts) - piece.counts
    target = np.repeat(places - before, piece.counts) + np.arange(len(piece.keys))
    order[target] = piece.order.astype(order.dtype) + order.dtype.type(start)
    keys[target] = piece.keys
    piece.order = piece.keys = None


def _sort_bucket(order: np.ndarray, keys: np.ndarray, ids: np.ndarray, start: int, stop: int) -> None:
    """Sorts one bucket by key, then id, in place; two equal keys are rare (n² / 2^65: 3e-6 at ten million)."""
    by_key = np.argsort(keys[start:stop])
    mine, sorted_keys = order[start:stop][by_key], keys[start:stop][by_key]
    if (sorted_keys[1:] == sorted_keys[:-1]).any():
        mine = mine[np.lexsort((ids[mine], sorted_keys))]
        twins = np.flatnonzero(np.diff(ids[mine]) == 0)
        if len(twins):
            raise UserError(
                f"clip table: clip_id {int(ids[mine[twins[0]]])} occurs more than once; every clip needs its own,"
                " probe the table again"
            )
    order[start:stop], keys[start:stop] = mine, sorted_keys
