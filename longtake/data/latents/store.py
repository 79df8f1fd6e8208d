"""Reading a store of latents and text embeddings that `longtake data encode` has made.

    store.json           format, what the store was made for, shapes and types, the names of the buckets
    plan.arrow           every (view, sample) to encode, in the order of the shards; where a clip has several captions,
                         one for each segment, their hashes too
    latents/000012.*     a shard (.safetensors) and its piece of the index (.parquet), there once the shard is whole;
                         beside "mean" and "std" of a clip, "head1.mean" and the like of the windows that may be known,
                         and "control.mean" and the like of what clips bring along
    texts/000003.*       the same for captions, each different one once
    empty.safetensors    what stands for no text
    index.*, texts.*     all pieces in one, written last: .parquet to look at, .arrow to be mapped into memory

Columns of the index: `view`, `sample` (id), `row` (of the clip table then), `bucket` (place in `store.json`'s names),
`num_frames, height, width, fps` (of the table then), `file_bytes, file_mtime_ns` (-1: no local file), `file_digest`
(64 bits over its contents; 0: unknown), `text` (64-bit hash of the caption), `shard`, `place` (row of the shard's
tensors), `crc` (CRC-32 of its bytes), `reason` (why the clip could not be read; its `shard` is -1).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from torch import Tensor

from longtake.contracts import Caption, LatentShape, UserError
from longtake.data.latents.shard import DTYPES, MEND, DamagedShard, LatentShards, crc_of, read_tensors
from longtake.data.latents.source import OF_VIDEO, EncoderFacts, UnusableLatents
from longtake.durable import unfinished
from longtake.random import hash64
from longtake.small_files import check_kinds, read_object

FORMAT_VERSION = 2
STORE_FILE, PLAN_FILE, EMPTY_FILE = "store.json", "plan.arrow", "empty.safetensors"
LATENTS, TEXTS = "latents", "texts"  # folders of shards
INDEX_NAMES = {LATENTS: "index", TEXTS: "texts"}  # of the whole index of each
SORTED_BY = {LATENTS: ("view", "sample"), TEXTS: ("text",)}
_READERS = 16  # threads that look at shards when a store is opened: on a network disk each look is a wait
PARTS = "parts"  # column of the plan: hashes of the captions of a clip's segments
DIGEST = "file_digest"
FACT_COLUMNS = ("num_frames", "height", "width", "fps")  # columns of the clip table that decide what is encoded

_COLUMNS = {
    LATENTS: "view int32, sample uint64, row int64, bucket int32, num_frames int64, height int64, width int64, "
    "fps double, file_bytes int64, file_mtime_ns int64, file_digest uint64, text uint64, shard int32, place int32, "
    "crc uint32, reason string",
    TEXTS: "text uint64, shard int32, place int32, crc uint32, caption string",
}
INDEX_SCHEMAS = {
    kind: pa.schema([tuple(column.split()) for column in columns.split(", ")]) for kind, columns in _COLUMNS.items()
}


class LatentStore:
    """A store on disk. Entries are read by memory map, one at a time; the index is mapped too where it is complete.

    Pickling carries the folder's name only. `complete`: every shard of the plan is there.
    """

    def __init__(self, folder: Path, facts: Mapping[str, Any]):
        """Use `open`."""
        self.folder, self.facts = folder, facts
        self.buckets: tuple[str, ...] = tuple(facts["buckets"])
        self.complete = all((folder / f"{name}.arrow").is_file() for name in INDEX_NAMES.values())
        self._shards = LatentShards(folder, tensors_of(facts))
        self._index = {kind: _columns(read_index(folder, kind)) for kind in INDEX_NAMES}
        views = self._index[LATENTS]["view"]
        self._texts = self._index[TEXTS]["text"] if not has_segments(facts) else self._whole_texts()
        self._starts = np.searchsorted(views, np.arange(int(facts["fingerprint"]["dataset.views"]) + 1))

    @classmethod
    def open(cls, folder: str | os.PathLike[str], check: bool = True) -> LatentStore:
        """Raise `UserError` where there is no store, one of another format, or (with `check`) one whose files are cut
        short."""
        folder = Path(folder).absolute()
        store = cls(folder, read_facts(folder))
        if check:
            store.check_sizes()
        return store

    def __reduce__(self) -> tuple:
        return LatentStore, (self.folder, self.facts)

    @property
    def place(self) -> str:
        """The folder."""
        return str(self.folder)

    def __len__(self) -> int:
        """Entries: (view, sample) pairs, those that could not be read included."""
        return len(self._index[LATENTS]["view"])

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of known frames that the store was made for: those whose frames are encoded apart."""
        return tuple(self.facts["made"].get("kinds", ()))

    def windows(self, num_frames: int) -> Mapping[str, int]:
        """Name -> latent frames of the windows that are encoded apart from clips of `num_frames` frames."""
        return self.facts.get("windows", {}).get(str(num_frames), {})

    def latent_tensors(self, num_frames: int, windows: Sequence[str]) -> dict[str, Any]:
        """Those of a clip, of what it brings along ("control.mean") and of windows: "head1.mean" has shape C 1 h w."""
        own, frames = tensors_of(self.facts)[LATENTS], self.windows(num_frames)
        return own | {
            of_window(name, moment): {**own[moment], "shape": ["C", frames[name], "h", "w"]}
            for name in windows
            for moment in OF_VIDEO
            if moment in own
        }

    def text_tensors(self) -> dict[str, Any]:
        """Those of one caption: "text" has shape L Dt, "vector" Dv."""
        return tensors_of(self.facts)[TEXTS]

    @cached_property
    def encoders(self) -> EncoderFacts:
        """The facts of the encoders that made the store."""
        empty = read_empty(self.folder, self.facts)
        latent, length = LatentShape(**self.facts["latent"]), int(self.facts["text_length"])
        return EncoderFacts(latent, length, empty, posterior="std" in self.facts["tensors"])

    def column(self, name: str) -> np.ndarray:
        """Return a numeric column of the index, one value an entry; entries are in the order of (view, sample)."""
        return self._index[LATENTS][name]

    def find(self, view: int, samples: np.ndarray, rows: np.ndarray | None = None) -> np.ndarray:
        """Return the entries of samples (uint64 [B]) in a view: int64 [B], -1 where there is none or its caption is not
        there.

        The shard of a caption may be another part's to make than that of the latents.
        """
        if not 0 <= view < len(self._starts) - 1:
            return np.full(len(samples), -1, np.int64)
        start, stop = int(self._starts[view]), int(self._starts[view + 1])
        entries = _find(self.column("sample")[start:stop], samples, start)
        there = np.flatnonzero(entries >= 0)
        texts = _find(self._texts, self.column("text")[entries[there]], 0)
        entries[there[texts < 0]] = -1
        return entries

    def samples(self, view: int) -> tuple[np.ndarray, np.ndarray]:
        """All entries of a view: rows of the clip table that was encoded, int64, and sample ids, uint64 ascending."""
        part = slice(int(self._starts[view]), int(self._starts[view + 1]))
        return self.column("row")[part], self.column("sample")[part]

    def reason(self, entry: int) -> str:
        """Why the clip of an entry could not be read; empty where it could."""
        return self._index[LATENTS]["reason"][entry].as_py()

    def latents(self, entry: int) -> dict[str, Tensor]:
        """As stored, on the CPU: "mean" [C, F, h, w] and the like, those of windows included."""
        if reason := self.reason(entry):
            raise UnusableLatents(reason)
        return self._read(LATENTS, entry)

    def texts(self, entry: int, caption: Caption) -> dict[str, Tensor]:
        """Return the caption of an entry that `find` gave: "text" [L, Dt] and "vector" [Dv]; of segments they are
        stacked."""
        if text_hash(caption) != int(self.column("text")[entry]):
            raise ValueError("it is not the one that was encoded")
        hashes = np.array([text_hash(part) for part in captions_of(caption)], np.uint64)
        parts = [self._read(TEXTS, place) for place in _find(self._index[TEXTS]["text"], hashes, 0).tolist()]
        if isinstance(caption, str):
            return parts[0]
        return {name: torch.stack([part[name] for part in parts]) for name in parts[0]}

    def check_sizes(self) -> None:
        """Raise `UserError` where a shard that the index names is missing or has lost bytes at its end."""
        for kind, columns in self._index.items():
            counts = np.bincount(columns["shard"][columns["shard"] >= 0])
            shards = np.flatnonzero(counts).tolist()
            with ThreadPoolExecutor(_READERS) as readers:
                faults = readers.map(partial(self._shards.fault, kind), shards, counts[shards].tolist())
                why = next(filter(None, faults), None)
            if why:
                raise UserError(f"{self.folder}: {why}; {MEND}")

    def _whole_texts(self) -> np.ndarray:
        """uint64, ascending: `text` of those entries the captions of whose segments are all there."""
        plan = read_table(self.folder / PLAN_FILE, pa.schema([("text", pa.uint64()), (PARTS, pa.list_(pa.uint64()))]))
        texts, parts = as_array(plan["text"]), plan[PARTS].combine_chunks()
        there = _find(self._index[TEXTS]["text"], np.asarray(parts.flatten()), 0) >= 0
        counted = np.concatenate([[0], np.cumsum(there)])
        starts = np.asarray(parts.offsets)
        return np.unique(texts[np.diff(counted[starts]) == np.diff(starts)])

    def _read(self, kind: str, place: int) -> dict[str, Tensor]:
        assert place >= 0, "an entry that `find` did not give"
        shard, row, crc = (int(self._index[kind][name][place]) for name in ("shard", "place", "crc"))
        try:
            return self._shards.read(kind, shard, row, crc)
        except DamagedShard as error:
            raise UnusableLatents(f"{error}; {MEND}") from error


def text_hash(caption: Caption) -> int:
    """Return the 64-bit hash under which a caption, suffix included, lies in a store; of several the hash of
    them all."""
    return hash64("caption", *captions_of(caption))


def captions_of(caption: Caption) -> tuple[str, ...]:
    """Each caption of a clip."""
    return (caption,) if isinstance(caption, str) else caption


def read_facts(folder: Path) -> dict[str, Any]:
    """What `store.json` says. Raises `UserError` where there is none, or one of another format."""
    path, remedy = folder / STORE_FILE, "encode again into another folder"
    try:
        facts = read_object(path, {}, remedy)
    except FileNotFoundError as error:
        raise UserError(
            f"{folder}: no {STORE_FILE} in it; give a folder that `longtake data encode` has made"
        ) from error
    name, version = facts.get("longtake_format"), facts.get("longtake_format_version")
    if name != "latent store" or version != FORMAT_VERSION:
        raise UserError(
            f"{path}: format version {repr(version)[:40]} of {repr(name)[:40]} was found, version {FORMAT_VERSION} of "
            f"'latent store' is read here; {remedy}"
        )
    kinds = {"fingerprint": dict, "made": dict, "buckets": list, "latent": dict, "text_length": int, "tensors": dict}
    check_kinds(path, facts, kinds, remedy)
    check_kinds(path, facts["fingerprint"], {"dataset.views": int}, remedy)
    check_kinds(path, facts["made"], {"table": str, "copies": str, "weights": dict}, remedy)
    try:
        _check_parts(facts)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise UserError(f"{path}: is not the description of a latent store; {remedy}") from error
    return facts


def _check_parts(facts: Mapping[str, Any]) -> None:
    """Raise some error where a part of `store.json` is not what its readers take it to be."""
    if not 1 <= facts["fingerprint"]["dataset.views"] < 2**31:
        raise ValueError("views")
    LatentShape(**facts["latent"])(17, 64, 64)
    for entry in chain.from_iterable(tensors.values() for tensors in tensors_of(facts).values()):
        if entry["dtype"] not in DTYPES or not all(isinstance(size, int | str) for size in entry["shape"]):
            raise ValueError("tensors")
    for name in chain(facts["buckets"], facts["made"].get("kinds", ())):
        if not isinstance(name, str):
            raise TypeError("names")
    for frames in chain.from_iterable(of_length.values() for of_length in facts.get("windows", {}).values()):
        int(frames)


def has_segments(facts: Mapping[str, Any]) -> bool:
    """Whether clips of a store have a caption for each segment, by what `store.json` says."""
    return bool(facts.get("segments", False))


def of_window(window: str, moment: str) -> str:
    """Return the name of a moment ("mean", "std") of a window's latents."""
    return f"{window}.{moment}"


def tensors_of(facts: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Kind of shard -> name -> {"dtype", "shape"} of an entry's tensor, by what `store.json` says."""
    found: dict[str, dict[str, Any]] = {LATENTS: {}, TEXTS: {}}
    for name, entry in facts["tensors"].items():
        found[LATENTS if name in OF_VIDEO else TEXTS][name] = {"dtype": entry["dtype"], "shape": entry["shape"]}
    found[LATENTS] |= facts.get("companions", {})
    return found


def read_empty(folder: Path, facts: Mapping[str, Any]) -> dict[str, Tensor]:
    """What stands for no text. Raises `UserError` where its file is damaged."""
    empty = read_tensors(folder / EMPTY_FILE)
    if facts.get("empty_crc", crc_of(empty)) != crc_of(empty):
        raise UserError(f"{folder / EMPTY_FILE}: has another checksum than when written; {MEND}")
    return empty


def read_index(folder: Path, kind: str) -> pa.Table:
    """Return the index of `LATENTS` or `TEXTS`, sorted; of an unfinished store, that of its shards. Raises
    `UserError`."""
    whole = folder / f"{INDEX_NAMES[kind]}.arrow"
    return read_table(whole, INDEX_SCHEMAS[kind]) if whole.is_file() else gather_index(folder, kind)


def gather_index(folder: Path, kind: str) -> pa.Table:
    """Return the pieces of the index that belong to finished shards, in one table and sorted. Raises `UserError`."""
    return join_pieces([read_table(piece, INDEX_SCHEMAS[kind]) for piece in pieces_of(folder, kind)], kind)


def pieces_of(folder: Path, kind: str) -> list[Path]:
    """Return the pieces of the index of `LATENTS` or `TEXTS`, by the numbers of their shards, which are whole."""
    return sorted((folder / kind).glob("[0-9]*.parquet"))  # those under way have names that begin with a dot


def join_pieces(pieces: Sequence[pa.Table], kind: str) -> pa.Table:
    """Pieces of the index in one table, sorted."""
    table = pa.concat_tables(pieces) if pieces else INDEX_SCHEMAS[kind].empty_table()
    order = pc.sort_indices(table, sort_keys=[(name, "ascending") for name in SORTED_BY[kind]])
    return table.take(order).combine_chunks()


def read_table(path: Path, schema: pa.Schema) -> pa.Table:
    """Return a Parquet file, or an Arrow file mapped into memory, whose columns are those of `schema`. Raises
    `UserError` that names the file and the remedy where it is damaged."""
    try:
        if path.suffix == ".parquet":
            table = pq.read_table(path, partitioning=None, page_checksum_verification=True)
        else:
            table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        table = table.replace_schema_metadata(None).select(schema.names)
        if not table.schema.equals(schema):
            raise ValueError("other columns")
        table.validate()
        return table
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        why = getattr(error, "strerror", None) or "cut short, or other bytes than were written"
        raise UserError(f"{path}: cannot be read ({why}); {MEND}") from error


def write_table(table: pa.Table, path: Path) -> None:
    """Write a Parquet or Arrow file that is whole or absent, and on disk when this returns. Raises OSError."""
    with unfinished(path) as partial:
        if path.suffix == ".parquet":
            pq.write_table(table, partial, compression="zstd", write_page_checksum=True)
        else:
            with pa.ipc.new_file(str(partial), table.schema) as writer:
                writer.write_table(table)


def _columns(table: pa.Table) -> dict[str, Any]:
    """Numbers as arrays (of a mapped table: without a copy), strings as Arrow has them."""
    return {
        name: table[name] if pa.types.is_string(table[name].type) else as_array(table[name])
        for name in table.column_names
    }


def as_array(column: pa.ChunkedArray) -> np.ndarray:
    """Return a numeric column as an array, without a copy where it is in one piece."""
    return column.chunk(0).to_numpy() if column.num_chunks == 1 else column.to_numpy()


def _find(values: np.ndarray, wanted: np.ndarray, start: int) -> np.ndarray:
    """Where each wanted value lies in ascending `values`, counted from `start`: int64, -1 where it does not."""
    wanted = np.asarray(wanted, np.uint64)
    if not len(values):
        return np.full(len(wanted), -1, np.int64)
    places = np.minimum(np.searchsorted(values, wanted), len(values) - 1)
    return np.where(values[places] == wanted, places + start, -1)
