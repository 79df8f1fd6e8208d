"""Reading a whole latent store to see that it is undamaged, and its clips to see that they are the ones encoded."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from longtake.contracts import UserError
from longtake.data import ClipTable, MixedTable
from longtake.data.latents import store
from longtake.data.latents.shard import DamagedShard, LatentShards
from longtake.encode.plan import Plan
from longtake.encode.shards import file_facts

_SHOWN = 10


@dataclass(frozen=True)
class VerifyResult:
    """What was found: counts, the first few sentences of each kind, and what there is to make again."""

    num_entries: int
    num_texts: int
    bad: int  # entries whose clip could not be read when the store was made
    complete: bool  # every shard of the plan is there
    damaged: tuple[str, ...]  # what has other bytes than were written
    changed: tuple[str, ...]  # clips whose file has another size or time than when it was encoded
    num_damaged: int
    num_changed: int
    shards: tuple[tuple[str, int], ...]  # (kind, number) of those damaged, or of a clip whose file has another size
    files: tuple[str, ...]  # names of other files that are damaged

    @property
    def is_damaged(self) -> bool:
        """Whether there is something to make again."""
        return bool(self.shards or self.files)


def whole_files(folder: Path) -> list[Path]:
    """The files of the whole index, which are there once all shards are."""
    return [folder / f"{name}{suffix}" for name in store.INDEX_NAMES.values() for suffix in (".parquet", ".arrow")]


def verify_store(
    folder: str | os.PathLike[str], table: ClipTable | MixedTable, progress: Callable[[int, int], None] | None = None
) -> VerifyResult:
    """Reads every entry and caption and compares its checksum; looks at size and time of every clip's file.

    `table`: the clips that were encoded; where it has changed since, files are not looked at. Raises `UserError` where
    the folder holds no store.
    """
    folder = Path(folder).absolute()
    facts = store.read_facts(folder)
    found = _Found(folder, facts)
    pieces = {kind: found.pieces(kind) for kind in store.INDEX_NAMES}
    index = {kind: store.join_pieces(list(of_kind.values()), kind) for kind, of_kind in pieces.items()}
    bad = int((store.as_array(index[store.LATENTS]["shard"]) < 0).sum())
    changed: dict[int, tuple[str, bool]] = {}
    if facts["made"]["table"] == table.fingerprint:
        changed = _changed_files(index[store.LATENTS], table)
    other = [row for row, (_, has_other_size) in changed.items() if has_other_size]
    done, total = 0, sum(map(len, index.values()))
    progress = progress or (lambda done, total: None)
    progress(done, total)
    for kind in (store.LATENTS, store.TEXTS):
        for number, piece in pieces[kind].items():
            found.read(kind, number, piece)
            if kind == store.LATENTS and np.isin(store.as_array(piece["row"]), other).any():
                found.shards.append((kind, number))
            done += len(piece)
            progress(done, total)
    complete = found.look_at_files(index)
    numbers = len(index[store.LATENTS]), len(index[store.TEXTS]), bad, complete
    shown = tuple(found.damaged[:_SHOWN]), tuple(sentence for sentence, _ in changed.values())[:_SHOWN]
    again = tuple(dict.fromkeys(found.shards)), tuple(found.files)
    return VerifyResult(*numbers, *shown, len(found.damaged), len(changed), *again)


@dataclass
class _Found:
    """What is damaged, as it is found."""

    folder: Path
    facts: Mapping[str, Any]
    damaged: list[str] = field(default_factory=list)
    shards: list[tuple[str, int]] = field(default_factory=list)
    files: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._shards = LatentShards(self.folder, store.tensors_of(self.facts))

    def pieces(self, kind: str) -> dict[int, pa.Table]:
        """Number -> piece of the index, of those that can be read."""
        found = {}
        for path in store.pieces_of(self.folder, kind):
            try:
                found[int(path.stem)] = store.read_table(path, store.index_schema(kind))
            except UserError as error:
                self._note(str(error))
                self.shards.append((kind, int(path.stem)))
        return found

    def read(self, kind: str, number: int, piece: pa.Table) -> None:
        """Reads every row of a shard."""
        shards, places, crcs = (store.as_array(piece[name]).tolist() for name in ("shard", "place", "crc"))
        faults = []
        if any(shard not in (-1, number) for shard in shards):
            faults.append(f"{kind}/{number:06d}.parquet names another shard than its own")
        for shard, place, crc in zip(shards, places, crcs, strict=True):
            try:
                if shard >= 0:
                    self._shards.read(kind, number, place, crc)
            except DamagedShard as error:
                faults.append(str(error))
        count = shards.count(number)
        if count and not faults and (fault := self._shards.fault(kind, number, count)):
            faults.append(fault)
        if faults:
            self.damaged += faults
            self.shards.append((kind, number))

    def look_at_files(self, index: Mapping[str, pa.Table]) -> bool:
        """Looks at everything but the shards, given what their pieces say; returns whether all of it is there."""
        self._try(store.PLAN_FILE, lambda: Plan.read(self.folder / store.PLAN_FILE, self.facts))
        self._try(store.EMPTY_FILE, lambda: store.read_empty(self.folder, self.facts))
        whole = whole_files(self.folder)
        for path in filter(Path.is_file, whole):
            kind = next(kind for kind, name in store.INDEX_NAMES.items() if name == path.stem)
            self._try(path.name, lambda path=path, kind=kind: _compare(path, kind, index[kind]))
        return all(map(Path.is_file, whole))

    def _try(self, name: str, read: Callable[[], object]) -> None:
        try:
            read()
        except UserError as error:
            self._note(str(error))
            self.files.append(name)

    def _note(self, sentence: str) -> None:
        self.damaged.append(sentence.rpartition("; ")[0])  # without the remedy, which is said once


def _compare(path: Path, kind: str, index: pa.Table) -> None:
    whole = store.read_table(path, store.index_schema(kind))
    if len(whole) != len(index) or not all(_same(whole[name], index[name]) for name in index.column_names):
        raise UserError(f"{path}: says something else than the pieces in {kind}; ")


def _same(here: pa.ChunkedArray, there: pa.ChunkedArray) -> bool:
    if pa.types.is_floating(here.type):  # an unknown rate is not equal to itself
        return np.array_equal(store.as_array(here), store.as_array(there), equal_nan=True)
    return here.equals(there)


def _changed_files(index: pa.Table, table: ClipTable | MixedTable) -> dict[int, tuple[str, bool]]:
    """Row of the table -> (what has happened to its file, whether its size is another)."""
    rows, first = np.unique(store.as_array(index["row"]), return_index=True)
    sizes, times = (store.as_array(index[name])[first].tolist() for name in ("file_bytes", "file_mtime_ns"))
    found = {}
    for row, size, time in zip(rows.tolist(), sizes, times, strict=True):
        if size < 0 or not 0 <= row < len(table):
            continue
        size_now, time_now = file_facts(table.location(row))
        if size_now < 0:
            found[row] = f"{table.written_path(row)} is gone", False
        elif size_now != size:
            found[row] = f"{table.written_path(row)} has changed since it was encoded: its size is another", True
        elif time_now != time:
            found[row] = f"{table.written_path(row)} has changed since it was encoded, or is a copy: same size", False
    return found
