"""Making one shard of a latent store: encode, write the tensors, then the piece of the index that says it is whole."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from longtake.buckets import BucketRule
from longtake.contracts import Batch, Bucket, Slot, UserError
from longtake.data import SlotDataset, of_window, text_hash
from longtake.data.latents.shard import crc_of, shard_path, whole_file, write_tensors
from longtake.data.latents.store import CLIP_FACTS, FORMAT_VERSION, LATENTS, TEXTS, index_schema
from longtake.diffusion import Window
from longtake.encode.plan import Plan, slot_of
from longtake.system import Encoders

_TEXTS_AT_ONCE = 64
_METADATA = {"longtake_format": "latent store index", "longtake_format_version": str(FORMAT_VERSION)}


class PixelSource(SlotDataset):
    """A `SlotDataset` whose batches have pixels and captions, and no draws for a trainer."""

    def __getitem__(self, slot: Slot) -> Batch:
        return self.read(slot, {})

    def batch_bytes(self, bucket: Bucket) -> int:
        frames, height, width = bucket.shape
        return bucket.batch_size * 3 * frames * height * width * (1 if self.compat is None else 4)


def piece_path(folder: Path, kind: str, number: int) -> Path:
    """The piece of the index of a shard; it is there exactly where the shard is whole."""
    return shard_path(folder, kind, number).with_suffix(".parquet")


def write_index(table: pa.Table, path: Path) -> None:
    """Writes a Parquet or Arrow file that is whole or absent."""
    table = table.replace_schema_metadata(_METADATA)
    with whole_file(path) as file:
        if path.suffix == ".parquet":
            pq.write_table(table, file, compression="zstd", write_page_checksum=True)
        else:
            with pa.ipc.new_file(file, table.schema) as writer:
                writer.write_table(table)


class LatentShard:
    """The entries of one shard of latents, as their batches come."""

    def __init__(self, number: int, plan: Plan, start: int, stop: int, source: SlotDataset):
        self.number, self.plan, self.start, self.stop, self.source = number, plan, start, stop, source
        self._tensors: dict[str, list[Tensor]] = {}
        self._place = 0
        self._entries: dict[str, list[Any]] = {name: [] for name in index_schema(LATENTS).names}

    @torch.inference_mode()
    def add(
        self,
        slot: Slot,
        batch: Batch,
        encoders: Encoders,
        dtype: torch.dtype | None,
        windows: Mapping[str, Window],
    ) -> int:
        """Encodes the batch of a slot, and its `windows` by themselves. Returns how many clips could be read."""
        good = np.flatnonzero(batch.weights.numpy())
        moments: dict[str, Tensor] = {}
        if len(good):
            moments = encoders.moments(batch.video)
            for window, place in windows.items():
                assert place.pixels is not None
                pixels = batch.video[:, :, place.pixels.start : place.pixels.stop].contiguous()  # as in training
                known = encoders.moments(pixels)
                moments |= {of_window(window, name): value for name, value in known.items()}
            moments = {name: (value if dtype is None else value.to(dtype)).cpu() for name, value in moments.items()}
        reasons = {fault.sample: fault.reason for fault in batch.faults}
        for i, sample in enumerate(slot.samples.tolist()):
            tensors = {name: value[i].contiguous() for name, value in moments.items()} if i in good else {}
            self._note(int(slot.rows[i]), sample, batch.text[i], tensors, reasons.get(sample, ""))
        return len(good)

    def write(self, folder: Path) -> Path:
        """Writes the shard, then its piece of the index, whose path it returns."""
        if self._tensors:
            stacked = {name: torch.stack(rows) for name, rows in self._tensors.items()}
            write_tensors(shard_path(folder, LATENTS, self.number), stacked)
        count = self.stop - self.start
        assert len(self._entries["sample"]) == count
        plan = slice(self.start, self.stop)
        self._entries |= {"view": self.plan.view[plan], "bucket": self.plan.bucket[plan]}
        path = piece_path(folder, LATENTS, self.number)
        write_index(pa.table(self._entries, schema=index_schema(LATENTS)), path)
        return path

    def _note(self, row: int, sample: int, text: str, tensors: Mapping[str, Tensor], reason: str) -> None:
        assert bool(tensors) != bool(reason)
        table = self.source.table
        entry = int(self.plan.text[self.start + len(self._entries["sample"])])
        _refuse_other_caption(table.written_path(row), text, entry)
        num_bytes, mtime = _file_facts(table.location(row))
        known = {"sample": sample, "row": row, "text": entry, "reason": reason}
        known |= {name: getattr(table, name)[row] for name in CLIP_FACTS}
        known |= {"file_bytes": num_bytes, "file_mtime_ns": mtime}
        known |= {"shard": -1, "place": -1, "crc": 0}
        if tensors:
            known |= {"shard": self.number, "place": self._place, "crc": crc_of(tensors)}
            self._place += 1
            for name, value in tensors.items():
                self._tensors.setdefault(name, []).append(value)
        for name, value in known.items():
            self._entries[name].append(value)


@torch.inference_mode()
def write_text_shard(
    folder: Path,
    number: int,
    plan: Plan,
    entries: np.ndarray,
    rule: BucketRule,
    source: SlotDataset,
    encoders: Encoders,
    dtype: torch.dtype | None,
) -> None:
    """Embeds the captions of some entries (int64 [n], the first of each different caption) and writes their shard."""
    captions = list(_captions(plan, entries, rule, source))
    tensors: dict[str, list[Tensor]] = {}
    for start in range(0, len(captions), _TEXTS_AT_ONCE):
        for name, value in encoders.embed(captions[start : start + _TEXTS_AT_ONCE]).items():
            tensors.setdefault(name, []).append((value if dtype is None else value.to(dtype)).cpu())
    stacked = {name: torch.cat(values) for name, values in tensors.items()}
    write_tensors(shard_path(folder, TEXTS, number), stacked)
    columns = {
        "text": plan.text[entries],
        "shard": np.full(len(entries), number, np.int32),
        "place": np.arange(len(entries), dtype=np.int32),
        "crc": [crc_of({name: value[i] for name, value in stacked.items()}) for i in range(len(entries))],
        "caption": captions,
    }
    write_index(pa.table(columns, schema=index_schema(TEXTS)), piece_path(folder, TEXTS, number))


def _captions(plan: Plan, entries: np.ndarray, rule: BucketRule, source: SlotDataset) -> Iterator[str]:
    for entry in entries.tolist():
        one = slice(entry, entry + 1)
        slot = slot_of(rule, int(plan.view[entry]), int(plan.bucket[entry]), plan.row[one], plan.sample[one])
        (text,) = source.texts(slot)
        _refuse_other_caption(source.table.written_path(int(plan.row[entry])), text, int(plan.text[entry]))
        yield text


def _refuse_other_caption(path: str, text: str, planned: int) -> None:
    if text_hash(text) != planned:
        raise UserError(
            f"the caption of {path} is {text[:80]!r} now, which is not the one that the store was begun with; encode "
            "into another folder"
        )


def _file_facts(location: str) -> tuple[int, int]:
    """Size and time of change of a local file; (-1, -1) where there is none."""
    try:
        found = os.stat(location)
    except OSError:
        return -1, -1
    return found.st_size, found.st_mtime_ns


def missing_pieces(folder: Path, kind: str, numbers: Sequence[int]) -> list[int]:
    """The shards, of some, that are not whole yet."""
    there = {path.stem for path in (folder / kind).glob("*.parquet")}
    return [number for number in numbers if f"{number:06d}" not in there]
