"""The clips below a folder as a table, with their captions and the states of their files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from longtake.contracts import UserError
from longtake.data.clips.caption_files import CAPTION_SUFFIX, CaptionFiles, name_key, read_caption
from longtake.data.clips.locations import refuse_url
from longtake.data.probing.walk import shortened, walk
from longtake.data.tables.ids import path_hashes
from longtake.data.tables.rows import STATES

UNREADABLE = "unreadable"  # the state of a file that cannot be looked at


@dataclass(frozen=True)
class Listing:
    """The clips of a folder or of a list, before they are probed."""

    clips: pa.Table  # path, text, clip_id and `changed`, a text that differs once the clip or its caption does
    lost: dict[int, str] = field(default_factory=dict)  # rows that cannot be used -> why
    notes: list[str] = field(default_factory=list)  # on files that are not used


def list_clips(folder: Path) -> Listing:
    """Return the clips below a folder, sorted by path, which starts from the folder, with `/`.

    `text` is what a clip's caption file holds, see `CaptionFiles`; empty where there is none. A caption that cannot be
    read costs its clip. Raises `UserError` where there is no clip.
    """
    refuse_url(folder)
    found, captions = walk(folder), CaptionFiles()
    if not found.clips:
        more = "".join(f"; {note}" for note in found.notes())
        raise UserError(f"{folder}: no video or picture in it or below; name a folder of clips, or a clip table{more}")
    texts, states, lost, used = [], [], {}, set()
    for row, path in enumerate(found.clips):
        state, text = file_state(folder / path), ""
        if (caption := captions.find(folder / path)) is not None:
            used.add(caption.relative_to(folder).as_posix())
            state = f"{state} {caption.name} {file_state(caption)}"
            try:
                text = read_caption(caption)
            except ValueError as error:
                lost[row] = str(error)
        texts.append(text)
        states.append(state)
    clips = pa.table(
        {
            "path": pa.array(found.clips, pa.string()),
            "text": pa.array(texts, pa.string()),
            "clip_id": pa.array(path_hashes(path.encode() for path in found.clips).astype(np.uint64)),
            STATES: pa.array(states, pa.string()),
        }
    )
    return Listing(clips, lost, found.notes() + _notes_on_texts(found.clips, found.texts, used))


def _notes_on_texts(clips: Sequence[str], texts: Sequence[str], used: set[str]) -> list[str]:
    """Return a sentence on text files that are no clip's caption: all `.txt`, others by the name of a clip."""
    keys = {name_key(name) for path in clips for name in (path, path.rpartition(".")[0])}
    unused = [
        path
        for path in texts
        if path not in used and (path.lower().endswith(CAPTION_SUFFIX) or name_key(path.rpartition(".")[0]) in keys)
    ]
    if not unused:
        return []
    return [f"{len(unused):,} text files belong to no clip ({shortened(unused)}): the caption of a.mp4 is in a.txt"]


def file_state(file: Path) -> str:
    """Return a text that differs once the file does."""
    try:
        stat = file.stat()
    except OSError:
        return UNREADABLE  # the probe says why
    return f"{stat.st_size} {stat.st_mtime_ns}"


def digest_of(texts: Iterable[str]) -> str:
    """16 hex digits over texts in their order."""
    digest = hashlib.blake2b(digest_size=8)
    for text in texts:
        digest.update(text.encode(errors="surrogateescape") + b"\0")
    return digest.hexdigest()
