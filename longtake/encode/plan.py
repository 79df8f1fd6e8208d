"""What there is to encode: every view of every sample that has a bucket in it, and every caption once.

The plan is a pure function of the clip table and the settings, in an order of its own: by view, bucket, row. Shards are
stretches of that order, so whoever makes a shard makes the same one.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from longtake.buckets.assignment import assign
from longtake.buckets.inputs import OrderInputs
from longtake.buckets.protocol import BucketLaw, keyed_draw
from longtake.contracts import Caption, Slot, UserError
from longtake.data.config import DatasetConfig
from longtake.data.latents.shard import MEND
from longtake.data.latents.store import PARTS, as_array, has_segments, read_table, text_hash, write_table
from longtake.data.tables.mix import MixedTable, clip_weights, order_columns
from longtake.data.tables.table import ClipTable
from longtake.random import hash64

_CHUNK = 1 << 16  # samples whose captions are made at once

_NUMBERS = {"view": pa.int32(), "bucket": pa.int32(), "row": pa.int64(), "sample": pa.uint64(), "text": pa.uint64()}
_SCHEMA = pa.schema(_NUMBERS)

Captions = Callable[[Slot], tuple[Caption, ...]]


def encode_inputs(
    config_seed: int, dataset: DatasetConfig, rule: BucketLaw, table: ClipTable | MixedTable, stage: int
) -> OrderInputs:
    """What decides the samples of a view and their buckets.

    With a mix weight of 2.25 a clip's third copy trains in some passes only; a store has all three in every view.
    """
    return OrderInputs(
        seed=config_seed,
        stage=stage,
        slots_per_step=1,
        rule=rule,
        weights=np.ceil(clip_weights(dataset, table.num_frames, table.weights)),
        views=dataset.views,
        **order_columns(table),
    )


def clips_of(inputs: OrderInputs) -> dict[str, Any]:
    """What tells whether two stores are of the same samples: the table, and how many copies of its clips there are."""
    copies = np.ascontiguousarray(np.broadcast_to(inputs.weights, inputs.num_clips), np.float64)
    return {"table": inputs.table, "copies": f"{hash64(copies.tobytes()):016x}"}


def view_samples(inputs: OrderInputs, view: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the samples of a view that have a bucket, in table order: rows int64, ids uint64, buckets int32,
    [n] each."""
    rows, ids = inputs.samples(view)
    rows = np.arange(inputs.num_clips) if rows is None else rows
    columns = (column[rows] for column in inputs.columns)
    codes = assign(inputs.rule, *columns, keyed_draw(inputs.seed, inputs.stage, view, ids))
    kept = codes >= 0
    return rows[kept], ids[kept], codes[kept]


def slot_of(rule: BucketLaw, view: int, bucket: int, rows: np.ndarray, samples: np.ndarray) -> Slot:
    """Return samples of one bucket and view as a slot; pass number `view` has that view."""
    shape = replace(rule.buckets[bucket], batch_size=len(rows))
    weights = np.ones(len(rows), np.float32)
    return Slot(shape, view, np.asarray(rows), np.asarray(samples), np.zeros(len(rows), np.uint64), weights)


@dataclass(frozen=True, eq=False)
class EncodePlan:
    """Every entry of a store, in the order of the shards; arrays of one length, from a mapped file if there is one."""

    view: np.ndarray  # int32
    bucket: np.ndarray  # int32, place in the rule's buckets
    row: np.ndarray  # int64, of the clip table
    sample: np.ndarray  # uint64
    text: np.ndarray  # uint64, hash of the caption, or of all captions of the clip's segments
    parts: pa.ListArray | None = None  # uint64, hashes of the captions of each entry's segments; None: it has one

    def __len__(self) -> int:
        return len(self.view)

    @cached_property
    def each_text(self) -> np.ndarray:
        """uint64: the hashes of the captions of all entries, one after the other."""
        return self.text if self.parts is None else np.asarray(self.parts.flatten())

    @cached_property
    def first_of_texts(self) -> np.ndarray:
        """int64 [U]: where each different caption is first among those of all entries, ascending."""
        return np.sort(np.unique(self.each_text, return_index=True)[1])

    def entry_of_text(self, place: int) -> tuple[int, int]:
        """Return the entry to which the caption at a place belongs, and its number among those of the entry."""
        if self.parts is None:
            return place, 0
        starts = np.asarray(self.parts.offsets)
        entry = int(np.searchsorted(starts, place, side="right")) - 1
        return entry, place - int(starts[entry])

    def latent_shards(self, entries_of: Callable[[int], int]) -> np.ndarray:
        """int64 [n, 2]: (first entry, one past the last) of each shard; `entries_of(bucket)` fit into one.

        A shard holds one bucket of one view.
        """
        both = np.stack([self.view, self.bucket], axis=1)
        edges = np.flatnonzero((both[1:] != both[:-1]).any(axis=1)) + 1
        shards = []
        for start, stop in zip(np.r_[0, edges], np.r_[edges, len(self)], strict=True):
            size = entries_of(int(self.bucket[start])) if stop > start else 1
            starts = np.arange(start, stop, size)
            shards.append(np.stack([starts, np.minimum(starts + size, stop)], axis=1))
        return np.concatenate(shards).astype(np.int64)

    def text_shards(self, size: int) -> np.ndarray:
        """int64 [n, 2]: (first, one past the last) of each shard among `first_of_texts`."""
        starts = np.arange(0, len(self.first_of_texts), size)
        return np.stack([starts, np.minimum(starts + size, len(self.first_of_texts))], axis=1)

    def slots(self, rule: BucketLaw, start: int, stop: int, size: int | None = None) -> Iterator[Slot]:
        """Entries of one shard, in slots of at most `size` samples (None: of the bucket's batch size)."""
        bucket = int(self.bucket[start])
        size = size or rule.buckets[bucket].batch_size
        for first in range(start, stop, size):
            last = min(first + size, stop)
            yield slot_of(rule, int(self.view[start]), bucket, self.row[first:last], self.sample[first:last])

    def write(self, path: Path) -> None:
        """Write the plan as an Arrow file that is whole or absent."""
        schema = _schema(self.parts is not None)
        write_table(pa.table({name: getattr(self, name) for name in schema.names}, schema=schema), path)

    @property
    def crc(self) -> int:
        """CRC-32 over the bytes of all entries."""
        crc = 0
        for name in _SCHEMA.names:
            crc = zlib.crc32(np.ascontiguousarray(getattr(self, name)).data, crc)
        for values in () if self.parts is None else (np.asarray(self.parts.offsets, np.int64), self.each_text):
            crc = zlib.crc32(np.ascontiguousarray(values).data, crc)
        return crc

    @classmethod
    def read(cls, path: Path, facts: Mapping[str, Any]) -> EncodePlan:
        """Return the plan of a store with these `facts`, mapped. Raises `UserError` where it is cut short or
        damaged."""
        table, crc = read_table(path, _schema(has_segments(facts))), facts.get("plan_crc")
        parts = table[PARTS].combine_chunks() if PARTS in table.column_names else None
        plan = cls(*(as_array(table[name]) for name in _SCHEMA.names), parts)
        if crc is not None and plan.crc != crc:
            raise UserError(f"{path}: has another checksum than when written; {MEND}")
        return plan


def _schema(segments: bool) -> pa.Schema:
    return _SCHEMA.append(pa.field(PARTS, pa.list_(pa.uint64()))) if segments else _SCHEMA


def make_plan(inputs: OrderInputs, captions: Captions, segments: bool = False) -> EncodePlan:
    """Return the plan of all views. `captions(slot)`: of its samples, suffix included; `segments`: each has several."""
    pieces, parts = [], []
    for view in range(inputs.views):
        rows, ids, codes = view_samples(inputs, view)
        order = np.argsort(codes, kind="stable")
        rows, ids, codes = rows[order], ids[order], codes[order]
        texts = np.empty(len(rows), np.uint64)
        for chunk in _chunks(codes):
            found = captions(slot_of(inputs.rule, view, int(codes[chunk.start]), rows[chunk], ids[chunk]))
            texts[chunk] = np.fromiter(map(text_hash, found), np.uint64, len(found))
            if segments:
                parts += [[text_hash(part) for part in text] for text in found]
        pieces.append((np.full(len(rows), view, np.int32), codes, rows, ids, texts))
    listed = pa.array(parts, pa.list_(pa.uint64())) if segments else None
    return EncodePlan(*(np.concatenate(column) for column in zip(*pieces, strict=True)), listed)


def _chunks(codes: np.ndarray) -> Iterator[slice]:
    """Stretches of samples of one bucket, of at most `_CHUNK`; codes: int32 [n], ascending."""
    edges = [0, *(np.flatnonzero(np.diff(codes)) + 1).tolist(), len(codes)]
    for first, stop in pairwise(edges):
        yield from (slice(start, min(start + _CHUNK, stop)) for start in range(first, stop, _CHUNK))


def entries_per_shard(shard_bytes: int, entry_bytes: int) -> int:
    """How many entries of a size make a shard; at least one."""
    return max(1, shard_bytes // max(1, entry_bytes))
