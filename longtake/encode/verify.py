"""Reading a whole latent store to see that it is undamaged, and its clips to see that they are the ones encoded."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from longtake.contracts import UserError
from longtake.data.latents import store
from longtake.data.latents.shard import DamagedShard, LatentShards
from longtake.data.tables.mix import MixedTable
from longtake.data.tables.table import ClipTable
from longtake.encode.changed import FilesThen, compare_files
from longtake.encode.plan import EncodePlan


@dataclass
class VerifyResult:
    """What was found: counts, sentences, and what there is to make again."""

    num_entries: int = 0
    num_texts: int = 0
    bad: int = 0  # entries whose clip could not be read when the store was made
    complete: bool = False  # every shard of the plan is there
    damaged: list[str] = field(default_factory=list)  # what has other bytes than were written
    changed: list[str] = field(default_factory=list)  # clips whose file is gone or another than when encoded
    shards: dict[tuple[str, int], None] = field(default_factory=dict)  # (kind, number) of those to make again
    files: list[str] = field(default_factory=list)  # names of other files that are damaged

    @property
    def is_damaged(self) -> bool:
        """True where there is something to make again: what is damaged, or is of a clip whose file has changed."""
        return bool(self.shards or self.files)


def whole_files(folder: Path) -> list[Path]:
    """Return the files of the whole index, which are there once all shards are."""
    return [folder / f"{name}{suffix}" for name in store.INDEX_NAMES.values() for suffix in (".parquet", ".arrow")]


def verify_store(
    folder: str | os.PathLike[str],
    table: ClipTable | MixedTable,
    progress: Callable[[int, int], None] | None = None,
    columns: Sequence[str] = (),
) -> VerifyResult:
    """Read every entry and caption and compare its checksum; compare the size and
    contents of every clip's file and of its auxiliary inputs, which the table has in `columns`.

    `table`: the clips that were encoded; where it has changed since, files are not looked at. Raises `UserError` where
    the folder holds no store.
    """
    folder = Path(folder).absolute()
    facts = store.read_facts(folder)
    found = VerifyResult()
    pieces = {kind: _read_pieces(folder, kind, found) for kind in store.INDEX_NAMES}
    index = {kind: store.join_pieces(list(of_kind.values()), kind) for kind, of_kind in pieces.items()}
    found.num_entries, found.num_texts = len(index[store.LATENTS]), len(index[store.TEXTS])
    found.bad = int((store.as_array(index[store.LATENTS]["shard"]) < 0).sum())
    changed: dict[int, tuple[str, bool]] = {}
    if facts["made"]["table"] == table.fingerprint:
        changed = _changed_files(index[store.LATENTS], table, columns)
    found.changed = [sentence for sentence, _ in changed.values()]
    other = [row for row, (_, is_other) in changed.items() if is_other]
    shards = LatentShards(folder, store.tensors_of(facts))
    done, total = 0, found.num_entries + found.num_texts
    progress = progress or (lambda done, total: None)
    progress(done, total)
    for kind in (store.LATENTS, store.TEXTS):
        for number, piece in pieces[kind].items():
            faults = _shard_faults(shards, kind, number, piece)
            found.damaged += faults
            if faults or (kind == store.LATENTS and np.isin(store.as_array(piece["row"]), other).any()):
                found.shards[kind, number] = None
            done += len(piece)
            progress(done, total)
    _look_at_files(folder, facts, index, found)
    return found


def _read_pieces(folder: Path, kind: str, found: VerifyResult) -> dict[int, pa.Table]:
    """Return number -> piece of the index, of those that can be read."""
    pieces = {}
    for path in store.pieces_of(folder, kind):
        if (piece := _tried(found, lambda path=path: store.read_table(path, store.INDEX_SCHEMAS[kind]))) is None:
            found.shards[kind, int(path.stem)] = None
        else:
            pieces[int(path.stem)] = piece
    return pieces


def _shard_faults(store_shards: LatentShards, kind: str, number: int, piece: pa.Table) -> list[str]:
    """Read every row of a shard; what is wrong with it."""
    shards, places, crcs = (store.as_array(piece[name]).tolist() for name in ("shard", "place", "crc"))
    faults = []
    if any(shard not in (-1, number) for shard in shards):
        faults.append(f"{kind}/{number:06d}.parquet names another shard than its own")
    for shard, place, crc in zip(shards, places, crcs, strict=True):
        try:
            if shard >= 0:
                store_shards.read(kind, number, place, crc)
        except DamagedShard as error:
            faults.append(str(error))
    count = shards.count(number)
    if count and not faults and (fault := store_shards.fault(kind, number, count)):
        faults.append(fault)
    return faults


def _look_at_files(folder: Path, facts: Mapping[str, Any], index: Mapping[str, pa.Table], found: VerifyResult) -> None:
    """Look at everything but the shards, given what their pieces say, and whether all of it is there."""
    reads: dict[str, Callable[[], object]] = {
        store.PLAN_FILE: lambda: EncodePlan.read(folder / store.PLAN_FILE, facts),
        store.EMPTY_FILE: lambda: store.read_empty(folder, facts),
    }
    whole = whole_files(folder)
    for path in filter(Path.is_file, whole):
        kind = next(kind for kind, name in store.INDEX_NAMES.items() if name == path.stem)
        reads[path.name] = lambda path=path, kind=kind: _compare(path, kind, index[kind])
    found.files = [name for name, read in reads.items() if _tried(found, read) is None]
    found.complete = all(map(Path.is_file, whole))


def _tried(found: VerifyResult, read: Callable[[], Any]) -> Any:
    """What is read; None where it is damaged, which is noted."""
    try:
        return read()
    except UserError as error:
        found.damaged.append(str(error).rpartition("; ")[0])  # without the remedy, which is said once
        return None


def _compare(path: Path, kind: str, index: pa.Table) -> pa.Table:
    whole = store.read_table(path, store.INDEX_SCHEMAS[kind])
    if len(whole) != len(index) or not all(_same(whole[name], index[name]) for name in index.column_names):
        raise UserError(f"{path}: differs from the pieces in {kind}; ")
    return whole


def _same(here: pa.ChunkedArray, there: pa.ChunkedArray) -> bool:
    if pa.types.is_floating(here.type):  # an unknown rate is not equal to itself
        return np.array_equal(store.as_array(here), store.as_array(there), equal_nan=True)
    return here.equals(there)


def _changed_files(
    index: pa.Table, table: ClipTable | MixedTable, columns: Sequence[str]
) -> dict[int, tuple[str, bool]]:
    """Row of the table -> (what has happened to its file, whether its contents are others)."""
    rows, first = np.unique(store.as_array(index["row"]), return_index=True)
    is_inside = (rows >= 0) & (rows < len(table))
    names = ("file_bytes", "file_mtime_ns", store.DIGEST)
    then = FilesThen(rows[is_inside], *(store.as_array(index[name])[first][is_inside] for name in names))
    changes = compare_files(then, table, columns, every_content=True)
    endings = {
        "is gone": (changes.gone, False),
        "has changed since it was encoded: its size is another": (changes.resized, True),
        "has changed since it was encoded: other contents of equal size": (changes.rewritten, True),
        "has changed since it was encoded, or is a copy: same size": (changes.unknown, False),
    }
    found = {
        row: (f"{table.written_path(row)} {ending}", is_other)
        for ending, (of_kind, is_other) in endings.items()
        for row in of_kind
    }
    return dict(sorted(found.items()))
