"""A folder of clips as a training set: its table is made once, kept, and brought up to date when files change."""

from __future__ import annotations

import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet

from longtake.contracts import UserError
from longtake.data.clips.animation import is_still
from longtake.data.clips.locations import is_url, join_location
from longtake.data.clips.video import is_image
from longtake.data.probing.listing import UNREADABLE, Listing, digest_of, list_clips
from longtake.data.probing.probe import probe_table, write_bad
from longtake.data.probing.walk import shortened
from longtake.data.tables.checks import floats
from longtake.data.tables.convert import lock, user_cache, writable_folder
from longtake.data.tables.rows import FOLDER_TABLE, NOTES, STATES
from longtake.data.tables.write_rows import OF_FILES, write_table
from longtake.random import available_cores

TABLE = FOLDER_TABLE
_MOST_WORKERS = 8
_NUMBERS = ("num_frames", "height", "width", "fps")


def folder_table(folder: Path) -> Path:
    """Return the table of the clips below a folder, with paths that start from the folder: made, or as it was if all
    is.

    It is `.longtake.parquet` in the folder, or lies in the user's cache folder where that cannot be written. Files
    that are new or have changed are probed; of files that are gone the rows go. Files that cannot be used are listed
    with their reasons in `.longtake.bad.csv` beside it, and said on stderr; they are tried again when anything in the
    folder changes. One process of a machine does this, the others wait. Raises `UserError` as `list_clips` and
    `probe_table` do.
    """
    table = writable_folder(folder.absolute(), user_cache(folder)) / TABLE
    return kept_table(folder, folder, list_clips(folder), table)


def kept_table(named: Path, folder: Path | str, listing: Listing, table: Path) -> Path:
    """Return the file `table`, which has the rows of a listing that can be used, in their order, with what was probed
    of them.

    `named`: what the user knows them by; `folder`: where their paths start; `listing`: with ids that all differ. Rows
    that `known_rows` finds numbers in are not probed. The table keeps the listing's notes, see `notes_of`.
    """
    clips = listing.clips
    lost = [f"{row} {reason}" for row, reason in listing.lost.items()]
    state = digest_of([*clips["path"].to_pylist(), *clips[STATES].to_pylist(), *lost, *listing.notes])
    if state_of(table) == state:
        return table
    with lock(table.with_suffix(".lock")):
        if state_of(table) != state:
            _bring_up_to_date(named, folder, listing, table, state)
    return table


def known_rows(clips: pa.Table, stills: np.ndarray) -> np.ndarray:
    """bool [N]: rows that say their frames, height and width; of `stills`, bool [N], the frames need not be said."""
    found = np.ones(len(clips), bool)
    for name in ("height", "width", "num_frames"):
        numbers = floats(clips, name) if name in clips.column_names else np.full(len(clips), np.nan)
        if name == "num_frames":
            numbers[stills] = 1
        found &= numbers >= 1
    return found & np.array([not state.startswith(UNREADABLE) for state in clips[STATES].to_pylist()], bool)


def _bring_up_to_date(named: Path, folder: Path | str, listing: Listing, table: Path, state: str) -> None:
    is_good = np.array([row not in listing.lost for row in range(len(listing.clips))], bool)
    rows, clips = np.flatnonzero(is_good), listing.clips.filter(pa.array(is_good))
    known = pyarrow.parquet.read_table(table) if state_of(table) else None
    same = np.zeros(len(clips), bool)
    if known is not None:
        same = pc.is_in(_facts(clips), value_set=_facts(known)).to_numpy(zero_copy_only=False)
        known = known.filter(pc.is_in(_facts(known), value_set=_facts(clips)))
    parts = [known] if known is not None and len(known) else []
    stills = _stills_of(clips, folder, same)
    said = known_rows(clips, stills) & ~same
    if said.any():
        parts.append(_as_said(clips.filter(pa.array(said)), stills[said]))
    places = np.flatnonzero(~same & ~said)
    paths = listing.clips["path"].to_pylist()
    bad = [(row, paths[row], reason) for row, reason in listing.lost.items()]
    if len(places):
        print(f"{named}: probing {len(places)} of {len(clips)} files, once, into {table}", file=sys.stderr, flush=True)
        found, lost = _probed(clips.take(pa.array(places)), folder)
        parts += [found] if found is not None else []
        bad = sorted(bad + [(int(rows[places[row]]), path, reason) for row, path, reason in lost])
    bad_list = write_bad(table.with_suffix(".bad.csv"), bad)
    if not parts:
        raise UserError(
            f"{named}: none of its {len(paths)} videos and pictures can be used, see {bad_list} (the first: "
            f"{bad[0][1]}: {bad[0][2]}); mend the files or name another folder"
        )
    joined = pa.concat_tables(parts, promote_options="permissive")
    order = pc.sort_indices(pc.index_in(joined["clip_id"], value_set=clips["clip_id"]))
    notes = []
    if bad:
        first = shortened([path or f"row {row}" for row, path, _ in bad])
        notes.append(f"{len(bad)} files cannot be used, see {bad_list} ({first})")
    notes += listing.notes
    write_table(joined.take(order), table, {"folder_state": state, NOTES: json.dumps(notes)})
    for note in notes:
        print(f"{named}: {note}", file=sys.stderr, flush=True)


def _stills_of(clips: pa.Table, folder: Path | str, same: np.ndarray) -> np.ndarray:
    """bool [N]: pictures of one frame; those that are the `same` as before, and those on servers, go by their names."""
    stills = np.array([is_image(path) for path in clips["path"].to_pylist()], bool)
    if "width" not in clips.column_names:  # all are probed
        return stills
    rows = np.flatnonzero(stills & ~same)
    files = [join_location(folder, clips["path"][row].as_py()) for row in rows.tolist()]
    with ThreadPoolExecutor(_MOST_WORKERS) as readers:
        stills[rows] = list(readers.map(lambda file: is_url(file) or is_still(file), files))
    return stills


def _as_said(clips: pa.Table, stills: np.ndarray) -> pa.Table:
    """Rows with numbers of their own, as a probe would have made them."""
    made = {name: floats(clips, name) for name in _NUMBERS if name in clips.column_names}
    frames = made.get("num_frames", np.full(len(clips), np.nan))
    frames = np.where(stills, 1, frames)
    columns: dict[str, pa.Array] = {"num_frames": pa.array(frames.astype(np.int64))}
    columns |= {name: pa.array(made[name].astype(np.int64)) for name in ("height", "width")}
    columns["fps"] = pa.array(made.get("fps", np.full(len(clips), np.nan)), from_pandas=True)
    others = {name: clips[name] for name in clips.column_names if name not in columns}
    return pa.table(others | columns)


def _probed(clips: pa.Table, folder: Path | str) -> tuple[pa.Table | None, list[tuple[int, str, str]]]:
    """Return the rows of the clips that can be used, in their order, and the bad ones; None where none can."""
    with tempfile.TemporaryDirectory(prefix="longtake-") as place:
        source, target = Path(place) / "listing.parquet", Path(place) / "probed.parquet"
        write_table(clips, source)
        workers = min(_MOST_WORKERS, available_cores(), len(clips) // 32)
        # One part of one: where no file can be used, an empty table is written.
        result = probe_table(source, target, workers=workers, root=folder, part=(1, 1))
        found = pyarrow.parquet.read_table(result.target)
    if not len(found):
        return None, list(result.bad_rows)
    kept = clips.filter(pc.is_in(clips["clip_id"], value_set=found["clip_id"]))
    for name in set(OF_FILES) & set(found.column_names):
        found = found.set_column(found.column_names.index(name), name, kept[name])
    return found, list(result.bad_rows)


def _facts(clips: pa.Table) -> pa.ChunkedArray:
    """Return a text for each clip that is equal where nothing has changed."""
    return pc.binary_join_element_wise(clips["path"], clips[STATES], "\0")


def state_of(table: Path) -> str | None:
    """What a table was made from; None where it is not there or of another kind."""
    try:
        metadata = pyarrow.parquet.read_schema(table).metadata or {}
    except (OSError, pa.ArrowException):
        return None
    return metadata.get(b"folder_state", b"").decode()
