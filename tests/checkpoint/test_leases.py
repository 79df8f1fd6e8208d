"""Leases: what is read stays, what nobody reads any more goes."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from longtake.checkpoint import leased, leases, retain
from longtake.checkpoint.leases import is_leased


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
