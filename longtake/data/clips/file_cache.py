"""Clips that lie on a server: fetched whole through fsspec into a bounded folder that the processes of a machine share.

The folder holds one file a URL, named by the URL's hash. Locks are `flock`s on the files themselves, so they end with
their process, whatever ends it:

- a reader holds a shared lock on its file; what is to be deleted must be locked exclusively first;
- who downloads a file holds `<name>.<bytes>.partial`, which is empty and stands for the bytes to come; each attempt
  writes to a file of its own, `<name>.<bytes>.<token>.partial`, so that a call that was given up and wakes up late
  spoils nothing; the complete one is renamed. A partial file that nobody has locked was left by a process that died,
  and is deleted;
- the file `used` holds the bytes taken, downloads in progress included. It may say too much after an interruption,
  never too little; the folder is only listed, and the sum made right, when the cache looks full;
- a file `<hash of the server>.absent` says since when, and why, a server is taken not to be there.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from longtake import locks
from longtake.contracts import UserError
from longtake.data.clips.locations import file_name, is_url
from longtake.data.clips.servers import cause_of, fetch_fault, find_file, in_time, is_absence, may_pass, server_of
from longtake.data.clips.video import ClipError, reason_of
from longtake.durable import replace
from longtake.small_files import cache_folder

_SUFFIX = re.compile(r"\.[A-Za-z0-9]{1,8}")
_OURS = re.compile(
    r"[0-9a-f]{32}(\.[A-Za-z0-9]{1,8})?(\.(?P<reserved>\d+)(?P<token>\.[0-9a-f]{8})?(?P<partial>\.partial))?"
)
_KEPT_SHARE = 0.9  # of the capacity, when room is made: the folder is then not listed again for a while
_ATTEMPTS = 4
_FIRST_PAUSE_SECONDS = 0.5  # before the second attempt; doubled each time
_ABSENT_SECONDS = 10.0  # so long a server that is not there is not asked again
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def default_cache_folder() -> Path:
    """`longtake/clips` in the user's cache folder (`XDG_CACHE_HOME`, else `~/.cache`)."""
    return cache_folder() / "clips"


@dataclass(frozen=True)
class FileCache:
    """A folder of fetched files, used by any number of processes of one machine; needs a file system with `flock`.

    What a URL holds is taken to stay the same: a file that is here is not asked for again.
    """

    folder: Path
    capacity_bytes: int = 20_000_000_000  # a file larger than this is fetched all the same, alone
    download_seconds: float = 300.0  # for one file, all attempts together

    @contextmanager
    def local(self, location: str) -> Iterator[str]:
        """Yield the path of a local file with what lies at `location`, which stays there for the body; a path is its
        own.

        Raises `ClipError` where it cannot be fetched, and `UserError` where that is not the clip's fault: a missing
        package, a cache folder that cannot be written.
        """
        if not is_url(location):
            yield location
        elif location.lower().startswith("file://"):
            yield unquote(urlsplit(location).path)
        else:
            path, handle = self._lease(location)
            try:
                yield str(path)
            finally:
                os.close(handle)

    def _lease(self, url: str) -> tuple[Path, int]:
        digest = hashlib.blake2b(url.encode(errors="surrogateescape"), digest_size=16).hexdigest()
        suffix = os.path.splitext(file_name(url))[1]
        path = self.folder / digest[:2] / (digest + (suffix if _SUFFIX.fullmatch(suffix) else ""))
        deadline = time.monotonic() + self.download_seconds
        while True:
            with _blaming_the_folder(self.folder), suppress(FileNotFoundError):
                handle = os.open(path, os.O_RDONLY)
                locks.flock(handle, locks.LOCK_SH)
                if _is_at(handle, path):
                    with suppress(OSError):
                        os.utime(handle)  # the time of the last use, by which the oldest are found
                    return path, handle
                os.close(handle)
            self._fetch(url, path, deadline)

    def _fetch(self, url: str, path: Path, deadline: float) -> None:
        """Put the file in its place, unless another process does: then returns when it should be there."""
        mark = self.folder / f"{server_of(url)}.absent"
        attempts = 1 if _absent_for(mark) is not None else _ATTEMPTS  # as long as nobody has found it again
        for attempt in range(attempts):
            since = _absent_for(mark)
            if since is not None and since < _ABSENT_SECONDS:
                with suppress(OSError):
                    raise ClipError(f"cannot be fetched: {mark.read_text(encoding='utf-8')}")
            try:
                self._fetch_once(url, path, deadline)
                if since is not None:
                    mark.unlink(missing_ok=True)
                return
            except (ClipError, UserError):
                raise
            except Exception as error:
                pause = _FIRST_PAUSE_SECONDS * 2**attempt
                cause = cause_of(error)
                if not may_pass(cause) or attempt == attempts - 1 or time.monotonic() + pause > deadline:
                    if is_absence(cause):
                        self._note_absence(mark, fetch_fault(cause))
                    raise ClipError(f"cannot be fetched: {fetch_fault(cause)}") from error
                time.sleep(pause)

    def _note_absence(self, mark: Path, reason: str) -> None:
        """Tells all processes that a server is not there: each file of it would take seconds to find that out."""
        with _blaming_the_folder(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            mark.write_text(reason, encoding="utf-8")

    def _fetch_once(self, url: str, path: Path, deadline: float) -> None:
        system, place, size = in_time(lambda: find_file(url), deadline, lambda: None)
        claim = path.with_name(f"{path.name}.{size or 0}.partial")
        with self._held(claim, deadline) as held:
            if held is None or path.exists():
                return
            self._reserve(size or 0, claim)
            content = claim.with_name(f"{path.name}.{size or 0}.{secrets.token_hex(4)}.partial")
            with self._held(content, deadline) as handle:
                assert handle is not None
                with _blaming_the_folder(self.folder):
                    in_time(lambda: system.get_file(place, str(content)), deadline, lambda: _written(content))
                    got = content.stat().st_size
                    if size is not None and got != size:
                        raise OSError(f"{got} of {size} bytes came")
                    os.fsync(handle)
                if got > (size or 0):
                    self._reserve(got - (size or 0), claim)
                replace(content, path, synced=False)

    @contextmanager
    def _held(self, path: Path, deadline: float) -> Iterator[int | None]:
        """Yield a handle of a new file, locked, deleted behind the body unless renamed; None: who had it has deleted
        it."""
        with _blaming_the_folder(self.folder):
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            while not _try_lock(handle):
                if time.monotonic() > deadline:
                    raise ClipError("cannot be fetched: another process took longer than dataset.download_seconds")
                time.sleep(0.05)
            mine = _is_at(handle, path)
            try:
                yield handle if mine else None
            finally:
                if mine and _is_at(handle, path):
                    path.unlink(missing_ok=True)
        finally:
            os.close(handle)

    def _reserve(self, num_bytes: int, claim: Path) -> None:
        """Count bytes that are about to be written, after deleting what was not used for the longest time."""
        with _blaming_the_folder(self.folder):
            counter = os.open(self.folder / "used", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            locks.flock(counter, locks.LOCK_EX)
            said = os.pread(counter, 32, 0).strip()
            used = int(said) if said.isdigit() else self.capacity_bytes
            if used + num_bytes > self.capacity_bytes:
                used = self._evict(int(self.capacity_bytes * _KEPT_SHARE) - num_bytes, claim)
            with _blaming_the_folder(self.folder):
                os.pwrite(counter, f"{used + num_bytes:<32d}".encode(), 0)
        finally:
            os.close(counter)

    def _evict(self, keep_bytes: int, claim: Path) -> int:
        """Delete the oldest files that nobody reads until at most `keep_bytes` are left; return what is left."""
        files, used = [], 0
        for folder in (entry for entry in os.scandir(self.folder) if entry.is_dir()):
            for entry in os.scandir(folder):
                ours = _OURS.fullmatch(entry.name)
                if ours is None or entry.path == str(claim):
                    continue
                with suppress(FileNotFoundError):
                    stat = entry.stat(follow_symlinks=False)
                    if ours["partial"] is None:
                        files.append((stat.st_mtime_ns, stat.st_size, entry.path))
                        used += stat.st_size
                    elif not _delete(entry.path):  # a download in progress: its claim says its size, if it is known
                        used += int(ours["reserved"]) if ours["token"] is None else 0
                        used += stat.st_size if not int(ours["reserved"]) else 0
        for _, size, path in sorted(files):
            if used <= keep_bytes:
                break
            used -= size if _delete(path) else 0
        return used


def _written(path: Path) -> tuple[int, int] | None:
    """What changes with every byte written to a file."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_size, stat.st_mtime_ns


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def _try_lock(handle: int) -> bool:
    try:
        locks.flock(handle, locks.LOCK_EX | locks.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _delete(path: str) -> bool:
    """Delete a file unless a process holds it."""
    try:
        handle = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return True
    except PermissionError:  # another user's
        return False
    try:
        if not _try_lock(handle):
            return False
        if _is_at(handle, Path(path)):
            os.unlink(path)
        return True
    finally:
        os.close(handle)


@contextmanager
def _blaming_the_folder(folder: Path) -> Iterator[None]:
    """Turn this machine's troubles with the cache folder into a `UserError`: no clip is to blame for them."""
    try:
        yield
    except OSError as error:
        local = isinstance(error.filename, str | os.PathLike) and Path(error.filename).is_relative_to(folder)
        if error.errno in _NO_SPACE or (
            local and isinstance(error, PermissionError | NotADirectoryError | FileExistsError)
        ):
            raise UserError(
                f"dataset.cache_dir = {str(folder)!r}: {reason_of(error)}; name a folder that can be written, with "
                "room for dataset.cache_gb"
            ) from error
        raise


def _absent_for(mark: Path) -> float | None:
    """Seconds since a server was last found to be absent; None where it was not."""
    try:
        return max(0.0, time.time() - mark.stat().st_mtime)
    except OSError:
        return None
