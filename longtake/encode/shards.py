"""Making one shard of a latent store: encode, write the tensors, then the piece of the index that says it is whole."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from longtake import locks
from longtake.contracts import Batch, Caption, Slot, UserError
from longtake.data.clips.captions import names_in
from longtake.data.clips.locations import is_url
from longtake.data.clips.video import ClipError
from longtake.data.latents.dataset import shown
from longtake.data.latents.shard import crc_of, shard_path, unpadded, write_tensors
from longtake.data.latents.store import (
    FACT_COLUMNS,
    FORMAT_VERSION,
    INDEX_SCHEMAS,
    LATENTS,
    STORE_FILE,
    TEXTS,
    captions_of,
    of_window,
    pieces_of,
    text_hash,
    write_table,
)
from longtake.data.loading.dataset import SlotDataset
from longtake.data.tables.mix import MixedTable
from longtake.data.tables.table import ClipTable
from longtake.diffusion.known import Window
from longtake.encode.plan import EncodePlan, slot_of
from longtake.system.encoders import Encoders
from longtake.system.examples import black_out, with_drawn_noise

_TEXTS_AT_ONCE = 64
_LARGEST = 2**63 - 1  # of a column of times
UNKNOWN_DIGEST = 0  # of a file that is not there
_METADATA = {"longtake_format": "latent store index", "longtake_format_version": str(FORMAT_VERSION)}


def piece_path(folder: Path, kind: str, number: int) -> Path:
    """Return the piece of the index of a shard; it is there exactly where the shard is whole."""
    return shard_path(folder, kind, number).with_suffix(".parquet")


def write_index(table: pa.Table, path: Path) -> None:
    """Write a Parquet or Arrow file that is whole or absent."""
    write_table(table.replace_schema_metadata(_METADATA), path)


@contextmanager
def in_use(folder: Path) -> Iterator[None]:
    """Inside, `remove_abandoned` of another process removes nothing; on a file system without locks it never does."""
    with open(folder / STORE_FILE, "rb") as file:
        with suppress(OSError):  # a file system without locks
            locks.flock(file, locks.LOCK_SH)
        yield


def remove_abandoned(folder: Path) -> None:
    """Remove what writers that were killed have left in a store, if nobody writes into it now."""
    with suppress(OSError), open(folder / STORE_FILE, "r+b") as file:  # network file systems lock what can be written
        locks.flock(file, locks.LOCK_EX | locks.LOCK_NB)
        for partial in folder.rglob(".*.partial*"):
            partial.unlink()


class LatentShard:
    """The entries of one shard of latents, as their batches come."""

    def __init__(self, number: int, plan: EncodePlan, start: int, stop: int, source: SlotDataset):
        self.number, self.plan, self.start, self.stop, self.source = number, plan, start, stop, source
        self._tensors: dict[str, list[Tensor]] = {}
        self._place = 0
        self._entries: list[dict[str, Any]] = []

    @torch.inference_mode()
    def add(
        self,
        slot: Slot,
        batch: Batch,
        encoders: Encoders,
        dtype: torch.dtype | None,
        windows: Mapping[str, Window],
    ) -> int:
        """Encode the batch of a slot, and its `windows` by themselves. Returns how many clips could be read."""
        good = np.flatnonzero(batch.weights.numpy())
        posterior: dict[str, Tensor] = {}
        if len(good):
            posterior = encoders.posterior(batch.video)
            for window, place in windows.items():
                pixels = batch.video[:, :, place.pixels.start : place.pixels.stop].clone()  # contiguous, as in training
                known = encoders.posterior(black_out(pixels, place, with_drawn_noise(batch)))
                posterior |= {of_window(window, name): value for name, value in known.items()}
            companions = encoders.companions(self.source.rules.companions, batch.companions)
            numbers = {one.name for one in self.source.rules.companions if one.kind == "numbers"}
            posterior = {
                name: kept_as(value, None if name in numbers else dtype)
                for name, value in (posterior | companions).items()
            }
        reasons = {fault.sample: fault.reason for fault in batch.faults}
        for i, sample in enumerate(slot.samples.tolist()):
            tensors = {name: value[i].contiguous() for name, value in posterior.items()} if i in good else {}
            self._note(int(slot.rows[i]), sample, batch.text[i], tensors, reasons.get(sample, ""))
        return len(good)

    def write(self, folder: Path) -> Path:
        """Write the shard, then its piece of the index, whose path it returns."""
        if self._tensors:
            stacked = {name: torch.stack(rows) for name, rows in self._tensors.items()}
            write_tensors(shard_path(folder, LATENTS, self.number), stacked)
        assert len(self._entries) == self.stop - self.start
        path = piece_path(folder, LATENTS, self.number)
        write_index(pa.Table.from_pylist(self._entries, INDEX_SCHEMAS[LATENTS]), path)
        return path

    def _note(self, row: int, sample: int, text: Caption, tensors: Mapping[str, Tensor], reason: str) -> None:
        assert bool(tensors) != bool(reason)
        table, place = self.source.table, self.start + len(self._entries)
        known = {name: getattr(self.plan, name)[place] for name in ("view", "bucket", "text")}
        _refuse_other_caption(table.written_path(row), text, int(known["text"]))
        known |= {"sample": sample, "row": row, "reason": reason, "shard": -1, "place": -1, "crc": 0}
        known |= {name: getattr(table, name)[row] for name in FACT_COLUMNS}
        files = files_of(table, row, self.source.rules.companion_columns)
        known["file_bytes"], known["file_mtime_ns"] = file_facts(files)
        known["file_digest"] = file_digest(files)
        if tensors:
            known |= {"shard": self.number, "place": self._place, "crc": crc_of(tensors)}
            self._place += 1
            for name, value in tensors.items():
                self._tensors.setdefault(name, []).append(value)
        self._entries.append(known)


@torch.inference_mode()
def write_text_shard(
    folder: Path,
    number: int,
    plan: EncodePlan,
    places: np.ndarray,
    source: SlotDataset,
    encoders: Encoders,
    dtype: torch.dtype | None,
) -> None:
    """Embeds the captions at some places of the plan, int64 [n], and writes their shard."""
    captions = list(_captions(plan, places, source))
    tensors: dict[str, list[Tensor]] = {}
    for start in range(0, len(captions), _TEXTS_AT_ONCE):
        for name, value in encoders.embed(captions[start : start + _TEXTS_AT_ONCE]).items():
            tensors.setdefault(name, []).append(kept_as(value, dtype))
    stacked = {name: torch.cat(values) for name, values in tensors.items()}
    write_tensors(shard_path(folder, TEXTS, number), unpadded(stacked))
    columns = {
        "text": plan.each_text[places],
        "shard": np.full(len(places), number, np.int32),
        "place": np.arange(len(places), dtype=np.int32),
        "crc": [crc_of({name: value[i] for name, value in stacked.items()}) for i in range(len(places))],
        "caption": captions,
    }
    write_index(pa.table(columns, schema=INDEX_SCHEMAS[TEXTS]), piece_path(folder, TEXTS, number))


def kept_as(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a tensor as a store keeps it, on the CPU: `dtype` (None: its own) is that of numbers with fractions."""
    return (value if dtype is None or not value.is_floating_point() else value.to(dtype)).cpu()


def _captions(plan: EncodePlan, places: np.ndarray, source: SlotDataset) -> Iterator[str]:
    for place in places.tolist():
        entry, number = plan.entry_of_text(place)
        one = slice(entry, entry + 1)
        slot = slot_of(source.law, int(plan.view[entry]), int(plan.bucket[entry]), plan.row[one], plan.sample[one])
        (text,) = source.texts(slot)
        _refuse_other_caption(source.table.written_path(int(plan.row[entry])), text, int(plan.text[entry]))
        yield captions_of(text)[number]


def _refuse_other_caption(path: str, text: Caption, planned: int) -> None:
    if text_hash(text) != planned:
        raise UserError(
            f"the caption of {path} is {shown(text)} now, which is not the one that the store was begun with; encode "
            "into another folder"
        )


def files_of(table: ClipTable | MixedTable, row: int, columns: Sequence[str]) -> list[str]:
    """Return the file of a row, and those that it names in the columns of auxiliary inputs."""
    found = [table.location(row)]
    for column in columns:
        with suppress(ClipError):  # not a list of files: there is none to change
            found += [table.location_of(row, name) for name in names_in(table.caption(row, column))]
    return [found[0], *(location for location in found[1:] if not is_url(location))]


def file_facts(locations: Sequence[str]) -> tuple[int, int]:
    """Return the sum of the sizes and of the times of change of local files; (-1, -1) where one is not there."""
    try:
        found = [os.stat(location) for location in locations]
    except OSError:
        return -1, -1
    return sum(one.st_size for one in found), sum(one.st_mtime_ns for one in found) & _LARGEST


def file_digest(locations: Sequence[str]) -> int:
    """64 bits over the contents of local files; 0 where one is not there."""
    digests = b""
    try:
        for location in locations:
            with open(location, "rb") as file:
                digests += hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=8)).digest()
    except (OSError, ValueError):
        return UNKNOWN_DIGEST
    whole = digests if len(locations) == 1 else hashlib.blake2b(digests, digest_size=8).digest()
    return int.from_bytes(whole, "little") or 1


def look_for_room(
    folder: Path,
    plan: EncodePlan,
    shards: Mapping[str, np.ndarray],
    latent_bytes: Callable[[int], int],
    text_bytes: int,
) -> None:
    """Says on stderr that what is missing of a store, by all parts, does not fit on its disk.

    `shards`: kind -> where each begins and ends in the plan, int64 [n, 2]; `latent_bytes`: of an entry of a bucket.
    """
    left = {kind: ends[missing_pieces(folder, kind, range(len(ends)))].tolist() for kind, ends in shards.items()}
    counts = sum((Counter(plan.bucket[start:stop].tolist()) for start, stop in left[LATENTS]), Counter())
    needed = sum(latent_bytes(bucket) * count for bucket, count in counts.items())
    needed += text_bytes * sum(stop - start for start, stop in left[TEXTS])
    if (free := shutil.disk_usage(folder).free) < needed:
        said = f"{free / 1e9:.3g} GB are free there, and what is to be encoded needs {needed / 1e9:.3g} GB"
        print(f"warning: {folder}: {said}; make room, or give another folder with -o", file=sys.stderr, flush=True)


def missing_pieces(folder: Path, kind: str, numbers: Sequence[int]) -> list[int]:
    """Return the shards, of some, that are not whole yet."""
    there = {path.stem for path in pieces_of(folder, kind)}
    return [number for number in numbers if f"{number:06d}" not in there]
