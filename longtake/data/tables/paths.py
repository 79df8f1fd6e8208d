"""Paths of clips as a table has them, when the table moves to another folder."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from longtake.data.clips.remote import is_url, join_location


def same_start(old: Path | str, new: Path) -> bool:
    """Whether relative paths mean the same from both folders."""
    return not isinstance(old, str) and os.path.realpath(old) == os.path.realpath(new)


def moved_paths(paths: Iterable[str | None], old: Path | str, new: Path) -> list[str]:
    """Paths that start from folder or URL `old`, written so that they start from folder `new`.

    Absolute paths, URLs and empty ones stay.
    """
    written = [path or "" for path in paths]
    if isinstance(old, str):
        return [join_location(old, path) if path else path for path in written]
    if same_start(old, new):
        return written
    start, end = os.path.realpath(old), os.path.realpath(new)
    return [
        path if not path or os.path.isabs(path) or is_url(path) else os.path.relpath(os.path.join(start, path), end)
        for path in written
    ]
