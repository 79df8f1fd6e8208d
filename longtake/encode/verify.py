"""Reading a whole latent store to see that it is undamaged, and its clips to see that they are the ones encoded."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from longtake.contracts import UserError
from longtake.data import ClipTable, MixedTable
from longtake.data.latents.shard import DamagedShard, Shards
from longtake.data.latents.store import (
    EMPTY_FILE,
    INDEX_NAMES,
    LATENTS,
    PLAN_FILE,
    TEXTS,
    as_array,
    index_schema,
    join_pieces,
    read_empty,
    read_facts,
    read_table,
    tensors_of,
)
from longtake.encode.plan import Plan

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
    return [folder / f"{name}{suffix}" for name in INDEX_NAMES.values() for suffix in (".parquet", ".arrow")]


def verify_store(
    folder: str | os.PathLike[str],
    table: ClipTable | MixedTable,
    progress: Callable[[int, int], None] | None = None,
) -> VerifyResult:
    """Reads every entry and caption and compares its checksum; looks at size and time of every clip's file.

    `table`: the clips that were encoded; where it has changed since, files are not looked at. Raises `UserError` where
    the folder holds no store.
    """
    folder = Path(folder).absolute()
    facts = read_facts(folder)
    found = _Found(folder, facts)
    pieces = {kind: found.pieces(kind) for kind in INDEX_NAMES}
    index = {kind: join_pieces(list(of_kind.values()), kind) for kind, of_kind in pieces.items()}
    bad = int((as_array(index[LATENTS]["shard"]) < 0).sum())
    changed: dict[int, tuple[str, bool]] = {}
    if facts["made"]["table"] == table.fingerprint:
        changed = _changed_files(index[LATENTS], table)
    other = [row for row, (_, has_other_size) in changed.items() if has_other_size]
    done, total = 0, sum(map(len, index.values()))
    progress = progress or (lambda done, total: None)
    progress(done, total)
    for kind in (LATENTS, TEXTS):
        for number, piece in pieces[kind].items():
            found.read(kind, number, piece)
            if kind == LATENTS and np.isin(as_array(piece["row"]), other).any():
                found.shards.append((kind, number))
            done += len(piece)
            progress(done, total)
    complete = found.look_at_files(index)
    return VerifyResult(
        len(index[LATENTS]),
        len(index[TEXTS]),
        bad,
        complete,
        tuple(found.damaged[:_SHOWN]),
        tuple(sentence for sentence, _ in list(changed.values())[:_SHOWN]),
        len(found.damaged),
        len(changed),
        tuple(dict.fromkeys(found.shards)),
        tuple(found.files),
    )


@dataclass
class _Found:
    """What is damaged, as it is found."""

    folder: Path
    facts: Mapping[str, Any]
    damaged: list[str] = field(default_factory=list)
    shards: list[tuple[str, int]] = field(default_factory=list)
    files: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._shards = Shards(self.folder, tensors_of(self.facts))

    def pieces(self, kind: str) -> dict[int, pa.Table]:
        """Number -> piece of the index, of those that can be read."""
        found = {}
        for path in sorted((self.folder / kind).glob("*.parquet")):
            try:
                found[int(path.stem)] = read_table(path, index_schema(kind))
            except UserError as error:
                self._note(str(error))
                self.shards.append((kind, int(path.stem)))
        return found

    def read(self, kind: str, number: int, piece: pa.Table) -> None:
        """Reads every row of a shard."""
        shards, places, crcs = (as_array(piece[name]).tolist() for name in ("shard", "place", "crc"))
        faults = []
        if any(shard not in (-1, number) for shard in shards):
            faults.append(f"{kind}/{number:06d}.parquet names another shard than its own")
        for place, crc in ((place, crc) for shard, place, crc in zip(shards, places, crcs, strict=True) if shard >= 0):
            try:
                self._shards.read(kind, number, place, crc)
            except DamagedShard as error:
                faults.append(str(error))
        count = Counter(shards)[number]
        fault = self._shards.fault(kind, number, count) if count and not faults else None
        if fault:
            faults.append(fault)
        if faults:
            self.damaged += faults
            self.shards.append((kind, number))

    def look_at_files(self, index: Mapping[str, pa.Table]) -> bool:
        """Looks at everything but the shards, given what their pieces say; returns whether all of it is there."""
        self._try(PLAN_FILE, lambda: Plan.read(self.folder / PLAN_FILE, self.facts.get("plan_crc")))
        self._try(EMPTY_FILE, lambda: read_empty(self.folder, self.facts))
        complete = True
        for kind, name in INDEX_NAMES.items():
            for path in (self.folder / f"{name}{suffix}" for suffix in (".parquet", ".arrow")):
                if path.is_file():
                    self._try(path.name, lambda path=path, kind=kind: _compare(path, kind, index[kind]))
                else:
                    complete = False
        return complete

    def _try(self, name: str, read: Callable[[], object]) -> None:
        try:
            read()
        except UserError as error:
            self._note(str(error))
            self.files.append(name)

    def _note(self, sentence: str) -> None:
        self.damaged.append(sentence.rpartition("; ")[0])  # without the remedy, which is said once


def _compare(path: Path, kind: str, index: pa.Table) -> None:
    whole = read_table(path, index_schema(kind))
    if len(whole) != len(index) or not all(_same(whole[name], index[name]) for name in index.column_names):
        raise UserError(f"{path}: says something else than the pieces in {kind}; ")


def _same(here: pa.ChunkedArray, there: pa.ChunkedArray) -> bool:
    if pa.types.is_floating(here.type):  # an unknown rate is not equal to itself
        return np.array_equal(as_array(here), as_array(there), equal_nan=True)
    return here.equals(there)


def _changed_files(index: pa.Table, table: ClipTable | MixedTable) -> dict[int, tuple[str, bool]]:
    """Row of the table -> (what has happened to its file, whether its size is another)."""
    rows, first = np.unique(as_array(index["row"]), return_index=True)
    sizes, times = (as_array(index[name])[first].tolist() for name in ("file_bytes", "file_mtime_ns"))
    found = {}
    for row, size, time in zip(rows.tolist(), sizes, times, strict=True):
        if size < 0 or not 0 <= row < len(table):
            continue
        try:
            now = os.stat(table.location(row))
        except OSError:
            found[row] = f"{table.written_path(row)} is gone", False
            continue
        if now.st_size != size:
            found[row] = f"{table.written_path(row)} has changed since it was encoded: its size is another", True
        elif now.st_mtime_ns != time:
            found[row] = f"{table.written_path(row)} has changed since it was encoded, or is a copy: same size", False
    return found


def file_size(location: str) -> int | None:
    """The size of a local file, bytes; None where there is none."""
    try:
        return os.stat(location).st_size
    except OSError:
        return None
