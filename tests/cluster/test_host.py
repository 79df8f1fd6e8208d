"""The program that runs on a host, where it can be asked without a connection."""

from __future__ import annotations

import fcntl
import os
import subprocess
from pathlib import Path

import pytest
import torch

from longtake.cluster import host


def test_logs_are_not_written_into_somebody_elses_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "jobs").symlink_to(tmp_path / "theirs")
    monkeypatch.setenv("LONGTAKE_JOBS", str(tmp_path / "jobs"))
    with pytest.raises(PermissionError, match="belongs to somebody else"):
        host._logs_folder()


def test_old_logs_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LONGTAKE_JOBS", str(tmp_path))
    for name, age in (("old.log", 8 * 86400), ("new.log", 86400)):
        (tmp_path / name).touch()
        made = (tmp_path / name).stat().st_mtime - age
        os.utime(tmp_path / name, (made, made))
    host._logs_folder()
    assert [path.name for path in tmp_path.glob("*.log")] == ["new.log"]


def test_a_folder_without_a_lock_is_in_nobodys_use(tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").touch()
    assert host._folders_in_use(str(tmp_path / "run")) == []
    with (tmp_path / "run" / ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert host._folders_in_use(str(tmp_path / "run")) == [str(tmp_path / "run")]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_hosts_gpus_are_found_with_what_runs_on_them():
    here = torch.ones(1 << 28, device="cuda")
    found = host._devices()
    assert len(found["gpus"]) >= torch.cuda.device_count()
    assert all(uuid.startswith("GPU-") for _, uuid in found["gpus"])
    for program in found["programs"]:  # those of other containers may be hidden
        assert program["pid"].isdigit()
        assert program["gpu"] is not None
    del here


def test_a_second_request_to_stop_can_only_make_the_end_earlier(monkeypatch: pytest.MonkeyPatch):
    job, killed = object.__new__(host.TorchrunJob), []
    monkeypatch.setattr(host.TorchrunJob, "kill", lambda self: killed.append(self))
    with subprocess.Popen(["sleep", "60"]) as job.process:
        job._kill_at, job._asked = None, False
        job.stop(60)
        job.tick()
        assert not killed
        for grace in (-1, 60):
            job.stop(grace)
            job.tick()
    assert killed == [job, job]
