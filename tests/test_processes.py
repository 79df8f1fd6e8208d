"""Processes beside this one end with it, whichever thread started them, and hear no signal that is meant for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from longtake import processes
from tests.forks import Forked
from tests.train.runs import PATIENCE_SECONDS

# Starts a process in the way asked for, writes its number, and waits to be killed.
PARENT = """
import sys, threading, time
from longtake import processes
where, method = sys.argv[1:]
def begin():
    global child
    child = processes.start(time.sleep, (600,), method, "sleeper").pid
    time.sleep(0.5)  # it is deaf by then, and bound to whom it ends with
if where == "thread":
    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
else:
    begin()
print(child, flush=True)
time.sleep(600)
"""


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(("where", "method"), [("main", "fork"), ("thread", "fork"), ("main", "spawn")])
def test_a_process_ends_with_its_parent_and_not_with_the_thread_that_started_it(where: str, method: str) -> None:
    parent = Forked([sys.executable, "-c", PARENT, where, method], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            os.kill(child, number)
        time.sleep(0.1)
        assert alive(child)
    finally:
        parent.kill()
        parent.wait()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while alive(child):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_how_a_process_ended_is_said_in_words() -> None:
    assert processes.how_it_ended(-signal.SIGKILL) == "killed by SIGKILL"
    assert processes.how_it_ended(3) == "exit code 3"
