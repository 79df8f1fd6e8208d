"""Where what is made of a table or a folder is kept: beside it, or in the user's cache folder; made once a machine."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from longtake.contracts import UserError
from longtake.data.clips.remote import refuse_url
from longtake.data.tables.convert import make_shards
from longtake.data.tables.shards import INDEX, is_shards

LARGE_BYTES = 256 << 20  # a table file above this is converted to shards without being asked for
_CONTENT_BYTES = 1 << 16  # read from either end of a file to tell whether it has changed


def is_large(source: Path) -> bool:
    """Whether a table is so large that a run should not hold its texts in memory."""
    return source.is_file() and source.stat().st_size > LARGE_BYTES


def cached_shards(source: Path) -> Path:
    """The folder of shards of a table file, converted if that has not been done since the file last changed.

    It lies beside the file as `.<name>.<key>.shards`, or in the user's cache folder where that cannot be written; the
    key is made of the file's size, time and both ends. One process of a machine converts, the others wait. Shards of
    an earlier state of the file are removed when no process reads them any more. Raises `UserError` as `make_shards`.
    """
    if not source.is_file():
        refuse_url(source)
        raise UserError(f"{source}: no such file; give a clip table as .csv, .parquet, .arrow, .json or .jsonl")
    name, key = f".{source.name}.", _key(source)
    for folder in (source.absolute().parent, user_cache(source)):
        if is_shards(folder / f"{name}{key}.shards"):
            return folder / f"{name}{key}.shards"
    folder = writable_folder(source.absolute().parent, user_cache(source))
    target = folder / f"{name}{key}.shards"
    with lock(folder / f"{name}lock") as alone:
        if is_shards(target):
            return target
        print(f"{source}: converting it to shards, once, in {target}", file=sys.stderr, flush=True)
        if alone:
            for left in folder.glob(f"{_escaped(f'.{name}')}*.partial"):  # of a conversion that was killed
                shutil.rmtree(left, ignore_errors=True)
        try:
            make_shards(source, target, root=source.absolute().parent)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST) and is_shards(target):
                return target  # another machine was faster
            raise
        if alone:
            _remove_earlier(folder, name, target)
    return target


def user_cache(source: Path) -> Path:
    """The folder for what belongs to one table or folder, under `XDG_CACHE_HOME` or `~/.cache`; not made yet."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = hashlib.blake2b(os.fsencode(source.absolute()), digest_size=8).hexdigest()
    return home / "longtake" / "tables" / digest


def writable_folder(first: Path, second: Path) -> Path:
    """`first` where this process may write there, else `second`, which is made."""
    if os.access(first, os.W_OK | os.X_OK):
        return first
    second.mkdir(parents=True, exist_ok=True)
    return second


@contextmanager
def lock(path: Path) -> Iterator[bool]:
    """Holds a lock file while the body runs; False where the file system has no locks, and nobody is kept out."""
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            yield False
        else:
            yield True


def _key(source: Path) -> str:
    """16 hex digits that change with the file."""
    stat = source.stat()
    digest = hashlib.blake2b(f"{stat.st_size} {stat.st_mtime_ns}".encode(), digest_size=8)
    with open(source, "rb") as file:
        digest.update(file.read(_CONTENT_BYTES))
        file.seek(max(0, stat.st_size - _CONTENT_BYTES))
        digest.update(file.read(_CONTENT_BYTES))
    return digest.hexdigest()


def _remove_earlier(folder: Path, name: str, target: Path) -> None:
    """Removes the shards of earlier states of a table; those that a process has open are left for next time."""
    for old in folder.glob(f"{_escaped(name)}*.shards"):
        if old == target or not is_shards(old):
            continue
        with suppress(OSError), open(old / INDEX) as index:
            fcntl.flock(index, fcntl.LOCK_EX | fcntl.LOCK_NB)  # readers hold it shared
            shutil.rmtree(old, ignore_errors=True)


def _escaped(name: str) -> str:
    """A file name as a glob pattern that means it."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)
