"""Failures of real trainings over two SSH servers, each provoked: named, and started again where that helps.

`make cluster`: a launch takes half a minute. What needs a GPU is told by texts alone: tests/cluster/test_diagnosis.py.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from signal import SIGKILL
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from longtake.cluster.diagnosis import Cause
from longtake.processes import RESTARTS
from tests.cluster.servers import Site, programs, start_launch, words_of
from tests.train.runs import kill, metrics, steps_saved, wait_until, write_config

STEPS = 6
PATIENCE_SECONDS = 900  # nothing waits so long where cores are free
MEMORY = Path("/sys/fs/cgroup/memory/longtake-tests")

# `longtake`, whose rank 1 runs FAULT before a step of its first start.
FAULTY = f"""
import ctypes, os, resource, signal, socket, sys, time
from contextlib import suppress
import torch
from longtake.cli import main
from longtake.train import loop

forward_backward = loop.Trainer.forward_backward


def cut_connections():
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found = socket.socket(fileno=os.dup(int(number)))
            if not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.shutdown(socket.SHUT_RDWR)


def faulty(self, *args):
    first = os.environ.get("{RESTARTS}", "0") == "0"
    if first and os.environ["RANK"] == "1" and self.clock.global_step == int(os.environ.get("AT", "3")):
        exec(os.environ["FAULT"])
    return forward_backward(self, *args)


loop.Trainer.forward_backward = faulty
main(sys.argv[1:])
"""


class Fault(NamedTuple):
    cause: Cause
    does: str = "pass"  # Python, on rank 1
    changes: Mapping[str, Any] = MappingProxyType({})  # of the config
    at: int = 3  # step
    labels: tuple[str, ...] = ("beta",)  # of which one is named


FAULTS = {
    "a bug in the loop": Fault(Cause.BUG, '{}["fps"]'),
    "a module that is not there": Fault(Cause.BUG, "import module_that_is_gone"),
    "a segmentation fault": Fault(Cause.BUG, "ctypes.string_at(0)"),
    "an abort": Fault(Cause.BUG, "os.abort()"),
    "a mistake in the config": Fault(Cause.BUG, changes={"lr": -1.0}, labels=("alpha", "beta")),
    "data that is not there": Fault(
        Cause.BUG, changes={"dataset": {"data_path": "gone.parquet"}}, labels=("alpha", "beta")
    ),
    "a table that is none": Fault(Cause.BUG, changes={"dataset": {"data_path": "faulty.py"}}, labels=("alpha", "beta")),
    "memory of the host, refused": Fault(
        Cause.OUT_OF_MEMORY, "resource.setrlimit(resource.RLIMIT_AS, (1 << 33,) * 2); torch.ones(1 << 34)"
    ),
    "SIGKILL from somebody": Fault(Cause.KILLED, "os.kill(os.getpid(), signal.SIGKILL)"),
    "a rank that is frozen": Fault(
        Cause.NO_PROGRESS, "os.kill(os.getpid(), signal.SIGSTOP)", {"watchdog_seconds": 30.0}, labels=("alpha", "beta")
    ),
    "a rank that waits for ever": Fault(
        Cause.NO_PROGRESS, "time.sleep(1e6)", {"watchdog_seconds": 30.0}, labels=("alpha", "beta")
    ),
    "no first step": Fault(
        Cause.NO_PROGRESS, "time.sleep(1e6)", {"first_step_timeout": 90.0}, at=0, labels=("alpha", "beta")
    ),
    "connections cut between ranks": Fault(Cause.NO_PROGRESS, "cut_connections()", labels=("alpha", "beta")),
}
pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def failures(found: dict[str, Any]) -> dict[str, Any]:
    return found.setdefault("failures provoked, two hosts of one rank each", {})


def write_run(folder: Path, clips: Path, **changes: Any) -> Path:
    (folder / "faulty.py").write_text(FAULTY)
    return write_config(folder, clips, max_steps=STEPS, ckpt_every=2, slots_per_step=2, **changes)


def launch(place: Site, folder: Path, config: Path, fault: str, at: int = 3) -> subprocess.Popen[str]:
    options = ("--restarts", 1, "--env", f"FAULT={fault}", "--env", f"AT={at}")
    return start_launch(place, "faulty.py", "train", config, folder=folder, options=options)


def check(launched: subprocess.Popen[str], cause: Cause, labels: tuple[str, ...], folder: Path) -> dict[str, Any]:
    """Waits for the end. What passes was started again once, and ended well; else nothing was."""
    try:
        _, error = launched.communicate(timeout=PATIENCE_SECONDS)
    finally:
        kill(launched)
    code = launched.returncode
    (diagnosis,) = re.findall(r"diagnosis: (.*)", error)
    assert diagnosis.startswith(tuple(f"{cause.title}, on {label}" for label in labels)), error
    assert error.count("starts again") == cause.passes, error
    assert (code == 0) == cause.passes
    if cause.passes:
        assert [line["step"] for line in metrics(folder / "outputs" / "tiny")] == list(range(1, STEPS + 1))
    return {"diagnosis": diagnosis.replace(f"{folder}/", ""), "exit_code": code, "started_again": int(cause.passes)}


@pytest.mark.parametrize("name", FAULTS)
def test_a_provoked_failure_is_named(
    name: str, place: Site, tmp_path: Path, clips: Path, failures: dict[str, Any]
) -> None:
    fault = FAULTS[name]
    config = write_run(tmp_path, clips, **fault.changes)
    launched = launch(place, tmp_path, config, fault.does, fault.at)
    failures[name] = check(launched, fault.cause, fault.labels, tmp_path)


@contextmanager
def mounted(folder: Path, kib: int) -> Iterator[None]:
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "none", str(folder)]
    if subprocess.run(words, capture_output=True).returncode != 0:
        pytest.skip("a small disk cannot be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_full(place: Site, tmp_path: Path, clips: Path, failures: dict[str, Any]) -> None:
    config = write_run(tmp_path, clips)
    with mounted(tmp_path / "outputs", kib=1024):
        launched = launch(place, tmp_path, config, "pass")
        failures["a full disk"] = check(launched, Cause.DISK_FULL, ("alpha", "beta"), tmp_path)


@pytest.mark.skipif(not os.access(MEMORY.parent, os.W_OK), reason="no control group of memory here")
def test_the_kernel_ends_a_process_for_want_of_memory(
    place: Site, tmp_path: Path, clips: Path, failures: dict[str, Any]
) -> None:
    MEMORY.mkdir()
    try:
        (MEMORY / "memory.limit_in_bytes").write_text(str(1 << 28))
        fault = f"open('{MEMORY}/cgroup.procs', 'w').write(str(os.getpid())); [torch.ones(1 << 24) for _ in range(99)]"
        launched = launch(place, tmp_path, write_run(tmp_path, clips), fault)
        failures["the kernel's OOM killer"] = check(launched, Cause.OUT_OF_MEMORY, ("beta",), tmp_path)
    finally:
        with suppress(OSError):
            MEMORY.rmdir()


def on_hosts(place: Site) -> Iterator[tuple[int, int]]:
    """The processes of `longtake-host`, each with that of the SSH server which holds its connection."""
    for program in programs(place, "longtake-host"):  # the words are on the command lines of ssh too
        pid = program
        while pid > 1 and not b"".join(words_of(pid)[:1]).startswith(b"sshd"):
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        if pid > 1:
            yield program, pid


HOLDS = {
    "the connection of a host is lost": lambda place: next(
        pid for pid in programs(place, "ssh") if b"beta" in words_of(pid)
    ),
    "the SSH server of a host is killed": lambda place: next(on_hosts(place))[1],
    "the program on a host is killed": lambda place: next(on_hosts(place))[0],
}


@pytest.mark.parametrize("name", HOLDS)
def test_a_host_is_lost(name: str, place: Site, tmp_path: Path, clips: Path, failures: dict[str, Any]) -> None:
    launched = launch(place, tmp_path, write_run(tmp_path, clips), "time.sleep(30)")
    wait_until(launched, lambda: bool(steps_saved(tmp_path / "outputs" / "tiny")))
    os.kill(HOLDS[name](place), SIGKILL)
    failures[name] = check(launched, Cause.NODE_AWAY, ("alpha", "beta"), tmp_path)
