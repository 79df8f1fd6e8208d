"""Files that are there whole or not at all, whatever ends the process that writes them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def unfinished(target: Path, synced: bool = True) -> Iterator[Path]:
    """A path to write to, which becomes `target` when the body ends well; else nothing of it stays.

    It lies in the folder of `target`, which is made, and has its suffix, by which many libraries choose a format.
    `synced`: after a power cut `target` is the new file or the old one; False: only after a kill (for what can be made
    again). Raises OSError.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.stem}.{os.getpid()}.partial{target.suffix}")
    try:
        yield partial
        if synced:
            sync_file(partial)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
    if synced:
        sync_folder(target.parent)


def write_whole(target: Path, content: str | bytes) -> None:
    """Writes a small file by way of `unfinished`; text in UTF-8."""
    with unfinished(target) as path:
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def sync_file(path: Path) -> None:
    """Waits until the bytes of a file are on disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Waits until the entries of a folder (new names, renames, removals) are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
