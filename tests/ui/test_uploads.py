"""Uploads have a limit in all and are removed with the command that names them."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from longtake.ui import uploads
from longtake.ui.queue import Queue
from longtake.ui.uploads import MAX_UPLOAD_BYTES, Uploads, remove_unused


def upload(folder: Path, name: str, num_bytes: int = 10) -> Path:
    path = folder / name / "first.png"
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(num_bytes))
    return path


def status(folder: Path, length: object, path: str = "/gradio_api/upload") -> int:
    """The status that an upload of a stated length gets; 200 where it reaches the page."""
    sent: list[dict[str, Any]] = []

    async def page(scope: dict, receive: object, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def keep(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = [] if length is None else [(b"content-length", str(length).encode())]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
    asyncio.run(Uploads(page, folder, list)(scope, None, keep))
    return sent[0]["status"]


def test_uploads_without_a_length_or_over_a_limit_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "MAX_TOTAL_BYTES", 1000)
    upload(tmp_path, "there", 600)
    assert [status(tmp_path, length) for length in (None, "x", 400, 401, 2 * MAX_UPLOAD_BYTES)] == [
        411,
        411,
        200,
        413,
        413,
    ]
    assert status(tmp_path, 401, "/gradio_api/upload/") == status(tmp_path, 401, "/gradio_api/process_recording") == 413
    assert status(tmp_path, 401, "/gradio_api/run/ask") == 200
    assert (tmp_path / "there" / "first.png").exists()


def test_uploads_are_removed_with_their_command_or_when_none_names_them(tmp_path: Path) -> None:
    queue, folder = Queue(tmp_path / "queue"), tmp_path / "uploads"
    waits, dropped, shared, unused, fresh = (upload(folder, name) for name in ("a", "b", "c", "d", "e"))
    for path in (waits, shared):
        queue.add("generate", ["generate", "model", "--ref", str(path)])
    for path in (dropped, shared):
        queue.stop(queue.add("generate", ["generate", "model", "--ref", str(path)]).name)
    for path in (waits, shared, unused):
        os.utime(path, (0, 0))
    remove_unused(folder, queue.jobs())
    assert sorted(folder.rglob("*.png")) == [waits, shared, fresh]
    assert not unused.parent.exists()
    queue.close()
