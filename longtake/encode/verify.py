"""Reading a whole latent store to see that it is undamaged, and its clips to see that they are the ones encoded."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from longtake.data import ClipTable, LatentStore, MixedTable
from longtake.data.latents.shard import DamagedShard

_SHOWN = 10


@dataclass(frozen=True)
class VerifyResult:
    """What was found: counts, and the first few sentences of each kind."""

    num_entries: int
    num_texts: int
    bad: int  # entries whose clip could not be read when the store was made
    complete: bool  # every shard of the plan is there
    damaged: tuple[str, ...]  # what has other bytes than were written
    changed: tuple[str, ...]  # clips whose file has another size or time than when it was encoded
    num_damaged: int
    num_changed: int


def verify_store(
    folder: str | os.PathLike[str],
    table: ClipTable | MixedTable,
    progress: Callable[[int, int], None] | None = None,
) -> VerifyResult:
    """Reads every entry and caption and compares its checksum; looks at size and time of every clip's file.

    `table`: the clips that were encoded; where it has changed since, files are not looked at. Raises `UserError` where
    the folder holds no store.
    """
    store = LatentStore.open(Path(folder), check=False)
    shards, total = store.column("shard"), len(store) + store.num_texts
    progress = progress or (lambda done, total: None)
    damaged, changed = [], []
    by_shard = np.argsort(shards, kind="stable").tolist()
    for done, entry in enumerate(by_shard):
        if shards[entry] >= 0:
            _try(lambda entry=entry: store.read(entry), damaged)
        progress(done, total)
    for done, place in enumerate(range(store.num_texts), start=len(store)):
        _try(lambda place=place: store.read_text_at(place), damaged)
        progress(done, total)
    if table.fingerprint == store.facts["made"]["table"]:
        changed = _changed_files(store, table)
    progress(total, total)
    return VerifyResult(
        len(store),
        store.num_texts,
        int((shards < 0).sum()),
        store.complete,
        tuple(damaged[:_SHOWN]),
        tuple(changed[:_SHOWN]),
        len(damaged),
        len(changed),
    )


def _try(read: Callable[[], object], damaged: list[str]) -> None:
    try:
        read()
    except DamagedShard as error:
        damaged.append(str(error))


def _changed_files(store: LatentStore, table: ClipTable | MixedTable) -> list[str]:
    rows, first = np.unique(store.column("row"), return_index=True)
    found = []
    for row, entry in zip(rows.tolist(), first.tolist(), strict=True):
        size, time = int(store.column("file_bytes")[entry]), int(store.column("file_mtime_ns")[entry])
        if size < 0:
            continue
        try:
            now = os.stat(table.location(row))
        except OSError:
            found.append(f"{table.written_path(row)} is gone")
            continue
        if (now.st_size, now.st_mtime_ns) != (size, time):
            found.append(f"{table.written_path(row)} has changed since it was encoded")
    return found
