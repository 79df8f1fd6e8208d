"""Pictures that browsers have uploaded: limited in all, and removed with the command that names them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from longtake.ui.gate import answer
from longtake.ui.queue import QueuedCommand

MAX_UPLOAD_BYTES = 64 * 2**20
MAX_TOTAL_BYTES = 2**30
_UNUSED_SECONDS = 3600.0  # that an upload waits for a command
_FORM_BYTES = 2**16  # of a request around its file
_PATHS = ("/gradio_api/upload", "/gradio_api/process_recording")  # that write what they are sent


class Uploads:
    """ASGI middleware in front of Gradio, which writes uploads into `folder` as `HASH/NAME`."""

    def __init__(self, app: Any, folder: Path, jobs: Callable[[], Sequence[QueuedCommand]]) -> None:
        self._app, self._folder, self._jobs = app, folder, jobs
        self._arriving = 0  # bytes of the requests that are being read

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"].rstrip("/") not in _PATHS:
            return await self._app(scope, receive, send)
        length = next((value for name, value in scope["headers"] if name.lower() == b"content-length"), b"")
        if not length.isdigit():
            return await answer(send, 411, "upload: send its length as Content-Length")
        if int(length) > MAX_UPLOAD_BYTES + _FORM_BYTES:
            limit = f"{MAX_UPLOAD_BYTES >> 20} MiB"
            return await answer(send, 413, f"upload: larger than {limit}; give a smaller picture, or a path")
        remove_unused(self._folder, self._jobs())
        if sum(map(_size, _files(self._folder))) + self._arriving + int(length) > MAX_TOTAL_BYTES:
            reason = f"uploads take {MAX_TOTAL_BYTES >> 20} MiB at most in all"
            return await answer(send, 413, f"upload: {reason}; delete folders of old commands in ui/queue")
        self._arriving += int(length)
        try:
            await self._app(scope, receive, send)
        finally:
            self._arriving -= int(length)


def remove_unused(folder: Path, jobs: Sequence[QueuedCommand]) -> None:
    """Remove uploads that no command names: at once where it was taken off the queue, else after an hour."""
    dropped = [job for job in jobs if job.state == "stopped" and not job.started]
    needed = [job for job in jobs if job not in dropped]
    for path in _files(folder):
        if _is_named(path, needed):
            continue
        with suppress(OSError):  # another request was faster, or the folder holds more
            if _is_named(path, dropped) or time.time() - path.stat().st_mtime > _UNUSED_SECONDS:
                path.unlink()
                path.parent.rmdir()


def _is_named(path: Path, jobs: Sequence[QueuedCommand]) -> bool:
    return any(str(path) in word for job in jobs for word in job.words)


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_size
    return 0
