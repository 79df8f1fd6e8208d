"""Leases: what is read stays, what nobody reads any more goes."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from longtake.checkpoint import leases
from longtake.checkpoint.leases import is_leased, leased
from longtake.checkpoint.runs import retain


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Three checkpoints of a run, taken for whole."""
    from longtake.checkpoint import runs

    folders = [tmp_path / f"epoch0-global_step{step}" for step in (1, 2, 3)]
    for folder in folders:
        folder.mkdir()
        (folder / runs.MARKER).write_text("{}")
    monkeypatch.setattr(
        runs, "_look_at", lambda path: runs.CheckpointInfo(path, *runs.parse_name(path.name), True, 0, 0)
    )
    return folders


def test_retention_leaves_what_is_leased_until_it_is_given_back(saved: list[Path]) -> None:
    first, second, third = saved
    with leased(first):
        assert retain(first.parent, keep_n_latest=1) == [second]
        assert first.exists()
    assert retain(first.parent, keep_n_latest=1) == [first]
    assert third.exists()
    assert not list((third.parent / leases.FOLDER).iterdir())


def _fill(path: Path, **content: object) -> None:
    path.write_text(json.dumps(content))


FOREIGN = {  # what another user may leave in place of a lease, and whether it holds the checkpoint
    "a folder": (Path.mkdir, False),
    "a link to itself": (lambda path: path.symlink_to(path.name), False),
    "a pipe": (os.mkfifo, False),
    "a pid of 31 digits": (lambda path: _fill(path, host=socket.gethostname(), pid=10**30), True),
    "an infinite pid": (lambda path: _fill(path, host=socket.gethostname(), pid=float("inf")), True),
    "a list": (lambda path: path.write_text("[1]"), True),
    "no text": (lambda path: path.write_bytes(b"\xff\0"), True),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_entry_among_leases_does_not_end_retention(saved: list[Path], kind: str) -> None:
    make, holds = FOREIGN[kind]
    folder = saved[0].parent / leases.FOLDER
    folder.mkdir()
    make(folder / f"{saved[0].name}.other-1")
    assert retain(saved[0].parent, keep_n_latest=1) == (saved[1:2] if holds else saved[:2])


@pytest.mark.parametrize("refusing", [Path.unlink, shutil.rmtree], ids=["a stale lease", "a checkpoint"])
def test_other_users_file_that_cannot_be_removed_does_not_end_retention(
    saved: list[Path], monkeypatch: pytest.MonkeyPatch, refusing: Callable[..., object]
) -> None:
    def refuse(path: Path, **options: object) -> None:
        if not options.get("ignore_errors"):
            raise PermissionError(13, "Permission denied", str(path))

    folder = saved[0].parent / leases.FOLDER
    folder.mkdir()
    stale = folder / f"{saved[0].name}.other-1"
    _fill(stale, host="other", pid=1)
    os.utime(stale, (1, 1))
    of_leases = refusing is Path.unlink
    monkeypatch.setattr(Path if of_leases else shutil, refusing.__name__, refuse)
    assert retain(saved[0].parent, keep_n_latest=1) == (saved[:2] if of_leases else [])


def test_a_lease_ends_with_its_holder(saved: list[Path]) -> None:
    checkpoint = saved[0]
    with leased(checkpoint):
        (lease,) = (checkpoint.parent / leases.FOLDER).iterdir()
        lease.write_text(json.dumps({"host": "elsewhere", "pid": 1}))  # on another machine nobody can ask
        assert is_leased(checkpoint)
        old = time.time() - leases.SECONDS - 1
        os.utime(lease, (old, old))
        assert not is_leased(checkpoint)
        assert not lease.exists()
    gone = os.fork()
    if not gone:
        os._exit(0)
    os.waitpid(gone, 0)
    with leased(checkpoint):
        (lease,) = (checkpoint.parent / leases.FOLDER).iterdir()
        lease.write_text(lease.read_text().replace(f": {os.getpid()}", f": {gone}"))
        assert not is_leased(checkpoint)
