"""What each start of a run came to, and what the GPUs of its nodes draw."""

from __future__ import annotations

import ctypes
import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from longtake.parallel.world import World
from longtake.train import loop
from longtake.train.health import power
from longtake.train.health.launches import read_launches
from longtake.train.health.power import NodePower
from tests.train.runs import metrics, train_here, write_config


def test_every_launch_is_written_down_with_its_end(
    clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_config(tmp_path, clips, max_steps=3, ckpt_every=2)
    folder = train_here(config)[0].folder
    train_here(folder)  # finds nothing to train
    monkeypatch.setattr(loop.Trainer, "validate", lambda self: 1 / 0 if self.clock.global_step == 4 else False)
    with pytest.raises(ZeroDivisionError):
        train_here(folder, "--max-steps", "6")
    monkeypatch.undo()
    train_here(folder, "--max-steps", "6")
    host = socket.gethostname()
    assert [(one.step, one.hosts, one.device) for one in read_launches(folder)] == [
        (0, {host: 1}, "cpu"),
        (3, {host: 1}, "cpu"),
        (4, {host: 1}, "cpu"),
    ]
    first, second, third = read_launches(folder)
    assert (first.ended, third.ended) == ("done", "done")
    assert (second.ended, second.host, second.why) == ("failed", host, "ZeroDivisionError: division by zero")
    assert "watts" not in metrics(folder)[-1]


def test_damaged_and_silent_launches(tmp_path: Path) -> None:
    begun = {"time": 1.0, "step": 0, "hosts": {"a": 8}, "device": "cpu", "reports": "hang-1"}
    failed = {"time": 2.0, "ended": "failed", "host": "a", "why": "first"}
    lines = [
        begun,
        failed,
        failed | {"why": "second"},
        begun | {"step": 5},
        {"step": "x"},
        7,
        begun | {"reports": "gone"},
    ]
    text = "\n".join(map(json.dumps, lines)) + "\nhalf a li"
    (tmp_path / "launches.jsonl").write_text('{"ended": "done"}\n' + text)
    assert [(one.ended, one.why) for one in read_launches(tmp_path)] == [
        ("failed", "first"),
        (None, None),
        (None, None),
    ]
    (tmp_path / "hang-1").mkdir()
    assert [one.ended for one in read_launches(tmp_path)] == ["hung", "hung", None]
    assert read_launches(tmp_path / "none") == []


class Nvml:
    """A driver whose only GPU has taken so many millijoules."""

    millijoules = 0

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByUUID(self, name: bytes, handle: Any) -> int:
        return 0 if name == b"GPU-1234" else 6

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any, counter: Any) -> int:
        counter._obj.value = self.millijoules
        return 0


def test_watts_are_joules_by_seconds_at_the_index_of_their_node(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml, clock = Nvml(), iter([10.0, 12.0, 13.0])
    monkeypatch.setattr(ctypes, "CDLL", lambda name: nvml)
    monkeypatch.setattr(power.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("", (), {"uuid": "1234"}))
    world = replace(World.here(), rank=2, size=4, device=torch.device("cuda", 0))
    monkeypatch.setattr(World, "gather", lambda self, value: ["a", "a", "b", "b"])
    node, watts = NodePower(world, every=2), torch.zeros(2)
    node.put(watts, step=2)  # the first reading has no time before it
    nvml.millijoules = 1_400_000
    node.put(watts, step=3)  # not of its turn
    assert watts.tolist() == [0.0] * 2
    node.put(watts, step=4)
    assert node.nodes == ["a", "b"]
    assert watts.tolist() == [0, 1400 / 2 / 2], "two ranks each add their half"
    assert power.GpuEnergy(torch.device("cuda", 0)).watts() == 0.0


def test_without_a_driver_there_are_no_watts() -> None:
    assert power.GpuEnergy(torch.device("cpu")).watts() == 0.0
    assert NodePower(World.here(), 1).nodes == []
