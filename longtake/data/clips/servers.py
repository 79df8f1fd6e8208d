"""What servers say of their files: asking them through fsspec, waiting no longer than one may, and their failures."""

from __future__ import annotations

import errno
import hashlib
import socket
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from typing import Any, TypeVar
from urllib.parse import urlsplit

from longtake.contracts import UserError
from longtake.data.clips.locations import is_url
from longtake.data.clips.video import ClipError, reason_of

_SILENCE_SECONDS = 30.0  # without a byte: the attempt is given up
_ABSENT = (errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH)
_PASSING_STATUS = (408, 425, 429)  # of the HTTP codes that blame the client, those worth another attempt

Result = TypeVar("Result")


def check_protocols(locations: Iterable[str]) -> None:
    """Raise `UserError` where some of these files could never be fetched: fsspec or one of its parts is missing."""
    for url in {location.split("://", 1)[0]: location for location in locations if is_url(location)}.values():
        if not url.lower().startswith("file://"):
            _system_of(url)


def find_file(url: str) -> tuple[Any, str, int | None]:
    """Return the file system of a URL, the file's name there, and its size in bytes where the server says it.

    Raises `UserError` where a package is missing, `ClipError` for an empty file, and what the file system raises.
    """
    _system_of(url)
    import fsspec

    system, place = fsspec.core.url_to_fs(url)
    info = system.info(place)
    if info.get("type") == "directory":
        raise IsADirectoryError("is a folder, not a file")
    size = info.get("size")
    if size == 0:
        raise ClipError("the file is empty")
    return system, place, size


def _system_of(url: str) -> None:
    """Import the kinds of file systems that a URL goes through. Raises `UserError`."""
    first, *others = url.split("::")  # as it may also stand in a file's name
    for part in [first, *(other for other in others if "://" in other)]:
        protocol = part.split("://", 1)[0].lower()
        try:
            import fsspec

            fsspec.get_filesystem_class(protocol)
        except ImportError as error:
            raise UserError(
                f"{url}: needs a package that is not installed ({error}); pip install '.[remote]' in Longtake's folder"
            ) from error
        except ValueError as error:
            raise UserError(
                f"{url}: {protocol}:// is not a protocol that fsspec knows; write s3://, gs://, https:// ... in the "
                "table's paths, dataset.root or --root"
            ) from error


def in_time(function: Callable[[], Result], deadline: float, progress: Callable[[], Any]) -> Result:
    """`function()`, given up at the deadline, or when `progress()` has not changed for a while.

    It runs in a thread of its own, because a call that waits for a server cannot be interrupted in another way. A
    thread that is given up is left to itself and ends with its connection, at the latest with the process.
    """
    outcome: Future[Result] = Future()

    def work() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=work, daemon=True, name="fetch").start()
    seen, since = progress(), time.monotonic()
    while not wait([outcome], min(0.2, _SILENCE_SECONDS)).done:
        now, found = time.monotonic(), progress()
        if found != seen:
            seen, since = found, now
        if now > deadline:
            raise ClipError("cannot be fetched: took longer than dataset.download_seconds")
        if now - since > _SILENCE_SECONDS:
            raise TimeoutError(f"nothing came for {_SILENCE_SECONDS:g} s")
    return outcome.result()


def server_of(url: str) -> str:
    """16 hex digits for the protocol and host (or bucket) of a URL."""
    address = urlsplit(url.rsplit("::", 1)[-1])
    return hashlib.blake2b(f"{address.scheme}://{address.netloc}".encode(), digest_size=8).hexdigest()


def is_absence(error: BaseException | None) -> bool:
    """Whether an error says that nothing answers at the address, or that there is no such address."""
    for _ in range(8):
        named = type(error).__name__ in ("EndpointConnectionError", "ClientConnectorDNSError")
        lost = isinstance(error, ConnectionRefusedError | socket.gaierror)
        if named or lost or getattr(error, "errno", None) in _ABSENT:
            return True
        if error is None:
            return False
        error = getattr(error, "os_error", None) or error.__cause__ or error.__context__
    return False


def cause_of(error: Exception) -> BaseException:
    """What lies behind the "file not found" that fsspec makes of every failure to ask a web server about a file."""
    return error.__cause__ if isinstance(error, FileNotFoundError) and error.__cause__ is not None else error


def may_pass(error: BaseException) -> bool:
    """Whether another attempt may do better."""
    status = getattr(error, "status", None)
    if isinstance(status, int) and 400 <= status < 500:
        return status in _PASSING_STATUS
    lasting = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, ValueError, ImportError)
    return not isinstance(error, lasting)


def fetch_fault(error: BaseException) -> str:
    """Why a file could not be fetched, as a clause."""
    status = getattr(error, "status", None)
    if isinstance(error, FileNotFoundError) or status == 404:
        return "no such file on the server"
    if isinstance(status, int):
        return f"the server answers {status} {getattr(error, 'message', '')}".rstrip()
    assert isinstance(error, Exception)
    return reason_of(error)
