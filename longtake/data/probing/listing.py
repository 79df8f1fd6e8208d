"""The clips of a folder: every video and picture in it and below, with the captions that lie beside them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa

from longtake.contracts import UserError
from longtake.data.clips.remote import refuse_url
from longtake.data.clips.video import IMAGE_SUFFIXES
from longtake.data.tables.ids import path_hashes

_VIDEOS = "mp4 m4v mov mkv webm avi gif ts m2ts mts mpg mpeg wmv flv 3gp ogv mxf"
VIDEO_SUFFIXES = frozenset(f".{name}" for name in _VIDEOS.split())


def list_clips(folder: Path) -> pa.Table:
    """A table of the clips below a folder, sorted by path: path (from the folder, with `/`), text, clip_id, changed.

    `text` is what the file of the same name ending in `.txt` holds, white space at its ends cut off; empty where there
    is none. `changed` is a text that differs once the clip or its caption does. Names that begin with a dot are left
    out. Raises `UserError` where there is no clip, and for a caption or a name that is not UTF-8.
    """
    refuse_url(folder)
    paths = sorted(_clips_below(folder))
    if not paths:
        raise UserError(f"{folder}: no video or picture in it or below; name a folder of clips, or a clip table")
    for path in paths:
        if not _is_text(path):
            raise UserError(f"{folder}: the file name {os.fsencode(path)!r} is not UTF-8; rename the file")
    texts, states = zip(*(_caption(folder, path) for path in paths), strict=True)
    return pa.table(
        {
            "path": pa.array(paths, pa.string()),
            "text": pa.array(texts, pa.string()),
            "clip_id": pa.array(path_hashes(path.encode() for path in paths).astype(np.uint64)),
            "changed": pa.array(states, pa.string()),
        }
    )


def _clips_below(folder: Path) -> list[str]:
    found = []
    for place, folders, files in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        inside = os.path.relpath(place, folder)
        for name in files:
            suffix = os.path.splitext(name)[1].lower()
            if not name.startswith(".") and (suffix in VIDEO_SUFFIXES or suffix in IMAGE_SUFFIXES):
                found.append(name if inside == os.curdir else f"{inside}/{name}")
    return found


def _is_text(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def _caption(folder: Path, path: str) -> tuple[str, str]:
    """The caption of a clip, and the state of its two files."""
    file = folder / path
    beside = file.with_suffix(".txt")
    state = _state(file)
    try:
        text = beside.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return "", state
    except UnicodeDecodeError as error:
        raise UserError(f"{beside}: the caption is not UTF-8 ({error.reason}); save it as UTF-8") from error
    return text, f"{state} {_state(beside)}"


def _state(file: Path) -> str:
    try:
        stat = file.stat()
    except OSError:
        return "unreadable"  # the probe says why
    return f"{stat.st_size} {stat.st_mtime_ns}"
