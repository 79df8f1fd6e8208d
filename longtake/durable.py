"""Files that are there whole or not at all, whatever ends the process that writes them."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def unfinished(target: Path, synced: bool = True, needs: int | None = None) -> Iterator[Path]:
    """Yield a path to write to, which becomes `target` when the body ends well; else nothing of it stays.

    It lies in the folder of `target`, which is made, and has its suffix, by which many libraries choose a format.
    `synced`: after a power cut `target` is the new file or the old one; False: only after a kill (for what can be made
    again). `needs`: the bytes that it will have, where known, for the error of a full disk. Raises OSError, with
    `target` in it.
    """
    partial = target.with_name(f".{target.stem}.{_writer()}.partial{target.suffix}")
    try:
        with naming(target, partial, needs):
            target.parent.mkdir(parents=True, exist_ok=True)
            yield partial
            if synced:
                sync_file(partial)
            replace(partial, target, synced)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def unfinished_folder(target: Path, needs: int | None = None) -> Iterator[Path]:
    """Yield an empty folder to write into, which becomes `target` when the body ends well; else nothing of it stays.

    The body syncs its files. `target` may be there as an empty folder. `needs`: as in `unfinished`. Raises OSError,
    with `target` in it.
    """
    partial = target.with_name(f".{target.name}.{_writer()}.partial")
    try:
        with naming(target, partial, needs):
            partial.mkdir(parents=True)
            yield partial
            sync_folder(partial)
            replace(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def replace(source: Path, target: Path, synced: bool = True) -> Path:
    """Rename a file or folder in one move, over what has the name `target`; `synced`: it lasts from then on.

    A folder with files in it cannot make way in the same move: it does in the moment before.
    """
    if source.is_dir() and target.is_dir() and any(target.iterdir()):
        old = target.with_name(f".{target.name}.{os.getpid()}.old")
        os.rename(target, old)
        os.rename(source, target)
        shutil.rmtree(old, ignore_errors=True)
    else:
        os.replace(source, target)
    if synced:
        sync_folder(target.parent)
    return target


def _writer() -> str:
    """Return a name for one write: the processes of two containers that share a folder may have the same number."""
    return f"{os.getpid()}-{os.urandom(4).hex()}"


def write_whole(target: Path, content: str | bytes, synced: bool = True) -> None:
    """Write a small file by way of `unfinished`; text in UTF-8."""
    data = content.encode() if isinstance(content, str) else content
    with unfinished(target, synced, len(data)) as path:
        path.write_bytes(data)


@contextmanager
def naming(target: Path, partial: Path | None = None, needs: int | None = None) -> Iterator[None]:
    """Yield a plain OSError of the body that names no file, or one at `partial`, names `target`.

    Where the disk is full it also says how much of the file was written by then, how much it `needs` where that is
    known, and how much is free.
    """
    try:
        yield
    except OSError as error:
        inside = error.filename is None or (partial is not None and str(error.filename).startswith(str(partial)))
        if error.errno is None or type(error).__module__ != "builtins" or not inside:  # others have words of their own
            raise
        reason = error.strerror
        if error.errno in DISK_FULL and "make room" not in reason:
            reason = os.strerror(error.errno) + _room(partial or target, needs)
        raise OSError(error.errno, reason, str(target)) from error


def _room(path: Path, needs: int | None) -> str:
    written = sum(file.stat().st_size for file in (path, *path.rglob("*")) if file.is_file())
    free = shutil.disk_usage(next(folder for folder in path.absolute().parents if folder.is_dir())).free
    done = f"{_megabytes(written)} of it" if needs is None else f"{_megabytes(written)} of {_megabytes(needs)}"
    return f" ({done} were written, {_megabytes(free)} are free); make room and try again"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f} MB" if count >= 1e8 else f"{count / 1e6:.3g} MB"


def sync_file(path: Path) -> None:
    """Wait until the bytes of a file are on disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the entries of a folder (new names, renames, removals) are on disk; Windows cannot open a folder."""
    if sys.platform == "win32":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
