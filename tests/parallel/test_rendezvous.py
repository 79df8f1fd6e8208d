"""Processes that wait for others by the variables in their environment."""

from __future__ import annotations

import os
import signal
import socket
from datetime import timedelta
from pathlib import Path

import pytest

from longtake.contracts import UserError
from longtake.parallel.rendezvous import join, launched_as
from tests.train.conftest import clips, config
from tests.train.runs import finish, free_port, start

__all__ = ["clips", "config"]


def variables(**changes: object) -> dict[str, str]:
    found = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()} | changes
    return {name: str(value) for name, value in found.items()}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_training_with_leftover_variables_says_for_whom_it_waits_and_ends_at_a_signal(
    config: Path, monkeypatch: pytest.MonkeyPatch, rank: int, number: int
) -> None:
    for name, value in variables(RANK=rank).items():
        monkeypatch.setenv(name, value)
    process = start("train", config)
    assert process.stderr is not None
    line = process.stderr.readline()
    assert all(f"{name}={os.environ[name]}" in line for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    assert "waiting for 1 more of 2 processes" in line
    process.send_signal(number)
    code, _, _ = finish(process)
    assert code not in (0, None)


@pytest.mark.parametrize(
    "changes",
    [{"RANK": 2}, {"RANK": -1}, {"RANK": "x"}, {"WORLD_SIZE": 0}, {"MASTER_PORT": "5" * 5000}, {"MASTER_PORT": ""}],
)
def test_variables_that_are_no_world_are_refused_by_name(changes: dict[str, object]) -> None:
    with pytest.raises(UserError, match=r"RANK=.* in the environment"):
        launched_as(variables(**changes))
    assert launched_as({"RANK": "1", "WORLD_SIZE": "2"}) is None
    assert launched_as(variables(RANK=1)) == (1, 2)


def test_missing_processes_and_a_taken_port_are_named() -> None:
    with pytest.raises(UserError, match="not all 2 processes came"):
        join(1, 2, timedelta(seconds=0.2), variables(RANK=1))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"MASTER_PORT = {port}: cannot listen"):
            join(0, 2, timedelta(seconds=5), variables(MASTER_PORT=port))
