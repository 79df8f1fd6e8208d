"""Launches over two SSH servers, as `longtake launch` makes them: real torchrun, real training."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.cluster.servers import Site, processes_of_launches, start_launch, wait_for_end
from tests.train.runs import exact, finish, start, steps_saved, wait_until, write_config

FAILING = """
import os, sys, time
if os.environ["RANK"] == "1":
    while not os.path.exists("up"):
        time.sleep(0.02)
    print("no more", file=sys.stderr)
    sys.exit(7)
open("up", "w").close()
time.sleep(1e6)
"""
DEAF = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open("up" + os.environ["RANK"], "w").close()
time.sleep(600)
"""


def program(folder: Path, text: str) -> str:
    (folder / "program.py").write_text(text, encoding="utf-8")
    return "program.py"


def test_two_hosts_train_as_one_machine_with_as_many_processes(place: Site, tmp_path: Path, clips: Path):
    config = write_config(tmp_path, clips, max_steps=3)
    code, out, error = finish(start_launch(place, "train", config, "--exp-name", "two hosts", folder=tmp_path))
    assert code == 0, error
    assert "[alpha] done at step 3" in out
    assert "2 processes" in out
    assert error.startswith("longtake launch: two hosts starts on 2 hosts: alpha, beta\n")

    assert finish(start("train", config, "--exp-name", "alone", processes=2))[0] == 0
    runs = tmp_path / "outputs"
    assert exact(runs / "two hosts") == exact(runs / "alone")
    assert exact(runs / "alone")


def test_a_host_that_fails_ends_the_launch_with_its_code_and_last_words(place: Site, tmp_path: Path):
    code, _, error = finish(start_launch(place, program(tmp_path, FAILING), folder=tmp_path))
    assert code == 7
    summary = error[error.index("beta has failed; stopping the others") :]
    assert "longtake launch: beta: rank 1 ended with exit code 7; its last lines:\n  no more\n" in summary
    assert "alpha: " not in summary
    assert "Traceback" not in error


def test_mistake_of_all_hosts_is_printed_once_and_first(place: Site, tmp_path: Path):
    config = write_config(tmp_path, tmp_path / "gone.csv", max_steps=1)
    code, _, error = finish(start_launch(place, "train", config, "--exp-name", "mistaken", folder=tmp_path))
    assert code == 2
    (line,) = [line for line in error.splitlines() if "gone.csv" in line]
    assert line.partition("] ")[2].startswith("longtake")
    assert error.splitlines().index(line) == 1  # after the names of the hosts
    assert "diagnosis" not in error


@pytest.mark.slow
def test_ctrl_c_saves_on_all_hosts_and_ends_with_130(place: Site, tmp_path: Path, clips: Path):
    config = write_config(tmp_path, clips, max_steps=100_000)
    launched = start_launch(place, "train", config, "--exp-name", "interrupted", folder=tmp_path)
    run = tmp_path / "outputs" / "interrupted"
    wait_until(launched, lambda: bool(exact(run)))
    launched.send_signal(signal.SIGINT)
    code, out, error = finish(launched)
    assert code == 130
    assert "[alpha] stopped at step" in out
    assert error.endswith("longtake launch: interrupted; all hosts have ended\n")
    assert len(steps_saved(run)) == 1


def test_a_killed_launcher_leaves_no_process_even_of_programs_that_will_not_stop(place: Site, tmp_path: Path):
    launched = start_launch(place, program(tmp_path, DEAF), folder=tmp_path, options=("--grace", 1))
    wait_until(launched, lambda: (tmp_path / "up0").exists() and (tmp_path / "up1").exists())
    assert len(processes_of_launches(place)) >= 6  # on each host: its program, torchrun, the worker
    launched.kill()
    wait_for_end(place)
    launched.communicate()
