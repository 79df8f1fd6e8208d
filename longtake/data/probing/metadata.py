"""Metadata of training programs as a clip table: a list with `file_path`, `text` and what else it says of each file.

[{"file_path": "a/clip.mp4", "text": "a horse in the snow", "type": "video", "width": 1280, "height": 720}]
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from longtake.data.clips.locations import is_url, join_location
from longtake.data.probing.folder import kept_table
from longtake.data.probing.listing import Listing, digest_of, file_state
from longtake.data.tables.convert import user_cache, writable_folder
from longtake.data.tables.ids import compute_clip_ids
from longtake.data.tables.rows import FOLDER_TABLE, STATES, open_rows, our_names
from longtake.data.tables.table import base_folder

FILE = "file_path"
_SUFFIXES = (".json", ".jsonl", ".csv")
_HEAD_BYTES = 1 << 16  # in which the first row says its keys


def is_metadata(source: Path) -> bool:
    """Whether a file lists clips under `file_path`. Raises `UserError` for one that should and is damaged."""
    if source.suffix.lower() not in _SUFFIXES or not source.is_file():
        return False
    with open(source, "rb") as file:
        if FILE.encode() not in file.read(_HEAD_BYTES):
            return False
    names = open_rows(source).names
    return FILE in names and "path" not in names


def metadata_table(source: Path, root: str | os.PathLike[str] | None) -> Path:
    """Return the clip table of a list: made, or as it was if all is; its rows are in the list's order.

    It is `.NAME.longtake.parquet` beside the list, or lies in the user's cache folder where that cannot be written.
    Rows that say frames, height and width, or of a picture height and width, are taken at their word; the files of all
    others are probed, once. `root`: as in `ClipTable.open`. Raises `UserError` as `open_rows` and `probe_table` do.
    """
    folder = base_folder(source, root)
    table = writable_folder(source.parent.absolute(), user_cache(source)) / f".{source.name}{FOLDER_TABLE}"
    return kept_table(source, folder, _listed(source, folder), table)


def _listed(source: Path, folder: Path | str) -> Listing:
    """Return the rows with columns of clip tables; `changed` differs once a row or its file does."""
    rows, unreadable = open_rows(source).whole()
    names = our_names(rows.column_names)
    rows = rows.rename_columns(names)
    paths = pc.fill_null(rows["path"].cast(pa.string()), "")
    rows = rows.set_column(names.index("path"), "path", paths)
    if "text" not in names:
        rows = rows.append_column("text", pa.array([""] * len(rows), pa.string()))
    files = [join_location(folder, path) if path else "" for path in paths.to_pylist()]
    states = ["" if is_url(file) else file_state(Path(file)) for file in files]
    cells = [digest_of(map(repr, row.values())) for row in rows.to_pylist()]
    changed = [f"{state} {cell}" for state, cell in zip(states, cells, strict=True)]
    for name, values in (
        ("clip_id", pa.array(np.asarray(compute_clip_ids(paths.to_pylist()), np.uint64))),
        (STATES, pa.array(changed, pa.string())),
    ):
        rows = rows.drop_columns([name]) if name in rows.column_names else rows
        rows = rows.append_column(name, values)
    return Listing(rows, unreadable)
