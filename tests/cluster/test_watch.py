"""What a launch refuses, and how it ends: over two SSH servers, with a small program in torchrun's place."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from longtake.cluster.arguments import Host
from longtake.cluster.launch import Launch, Launcher
from longtake.contracts import UserError
from tests.cluster.servers import NAMES, ROOT, Site, processes_of_launches, programs, wait_for_end, words_of
from tests.train.runs import PATIENCE_SECONDS

# torchrun starts its workers in sessions of their own and passes SIGTERM on; so does this.
TORCHRUN = """
import os, signal, subprocess, sys
words = sys.argv[1:]
value = lambda key: words[words.index(key) + 1]
program = [word for word in words if word.endswith(".py")][0]
rank = value("--node-rank")
worker = subprocess.Popen([sys.executable, program], env={**os.environ, "RANK": rank}, start_new_session=True)
signal.signal(signal.SIGTERM, lambda *_: worker.send_signal(signal.SIGTERM))
sys.exit(worker.wait() and 1)
"""
WAITS = """
import os, signal, time
if "DEAF" in os.environ:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
open("up" + os.environ["RANK"], "w").close()
while not os.path.exists("end"):
    time.sleep(0.02)
print("ends", os.environ["RANK"])
"""
FAREWELL = """
import os, signal, sys
def leave(*_):
    print("farewell of", os.environ["RANK"], flush=True)
    sys.exit(1)
signal.signal(signal.SIGTERM, leave)
"""
SMI = """#!/bin/sh
case "$1" in
    *query-gpu*) echo "0, GPU-aa"; echo "1, GPU-bb";;
    *) echo "GPU-aa, 4242, 70000 MiB, /opt/other/python";;
esac
"""


@pytest.fixture
def planned(place: Site, tmp_path: Path) -> Launch:
    """A launch of a program that waits until there is a file `end`."""
    (tmp_path / "program.py").write_text(WAITS)
    stand_in = tmp_path / "stand_in" / "torch" / "distributed"
    stand_in.mkdir(parents=True)
    for package in (stand_in.parent, stand_in):
        (package / "__init__.py").touch()
    (stand_in / "run.py").write_text(TORCHRUN)
    return Launch(
        hosts=[Host("alpha"), Host("beta")],
        words=["program.py"],
        name="waiting",
        folder="outputs/waiting",
        workdir=str(tmp_path),
        processes=1,
        environment={"PYTHONPATH": f"{tmp_path / 'stand_in'}:{ROOT}", "LONGTAKE_JOBS": str(place.jobs)},
        ssh=place.ssh.split(),
        grace=120.0,
    )


def until(ready: Callable[[], bool]) -> None:
    """Waits; not for ever, so that the launch ends in any case."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not ready() and time.monotonic() < end:
        time.sleep(0.02)


def when(ready: Callable[[], bool], act: Callable[[], object]) -> threading.Thread:
    """Does something as soon as something else is so, beside the launch."""

    def watch() -> None:
        until(ready)
        act()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def up(folder: Path) -> bool:
    return (folder / "up0").exists() and (folder / "up1").exists()


def run(launch: Launch) -> int:
    return Launcher(launch).run()


def refused(planned: Launch) -> str:
    with pytest.raises(UserError) as caught:
        run(planned)
    return str(caught.value)


def test_all_faults_of_all_hosts_come_together_and_nothing_starts(planned: Launch, tmp_path: Path):
    hosts = [Host("alpha"), Host("beta", port=1), Host("nowhere.invalid")]
    said = refused(replace(planned, hosts=hosts, workdir=str(tmp_path / "gone")))
    head, alpha, beta, nowhere = said.splitlines()
    assert head == "nothing was started"
    assert f"alpha: working directory {tmp_path / 'gone'}: No such file or directory" in alpha
    assert "beta:1: cannot be reached: " in beta
    assert "Connection refused" in beta
    assert "nowhere.invalid: cannot be reached: " in nowhere
    assert "--force" not in said  # it would not help
    assert not (tmp_path / "up0").exists()


def test_a_missing_python_is_named(planned: Launch):
    said = refused(replace(planned, python="/gone/python"))
    assert said.count("cannot run /gone/python: ") == 2
    assert "choose another with --python" in said


def test_a_python_without_longtake_is_named(planned: Launch):
    bare = {**planned.environment, "PYTHONPATH": ""}
    said = refused(replace(planned, python="/usr/bin/python3", environment=bare))
    assert "no longtake and no torch" in said or "is needed; choose one with --python" in said


def test_a_run_of_the_same_name_stops_the_launch_unless_forced(planned: Launch, place: Site, tmp_path: Path):
    first = threading.Thread(target=run, args=(planned,))
    first.start()
    try:
        until(lambda: up(tmp_path))
        said = refused(planned)
        assert said.count("a run named waiting is there (pid ") == 2
        assert "--force launches all the same" in said
        (tmp_path / "end").touch()
        assert run(replace(planned, force=True)) == 0
    finally:
        (tmp_path / "end").touch()
        first.join()
    assert run(planned) == 0  # what has ended is in nobody's way


@pytest.mark.parametrize("folder", ["waiting", "waiting-2", "waiting/stage1"])
def test_a_run_folder_in_which_somebody_trains_stops_the_launch(planned: Launch, tmp_path: Path, folder: str):
    lock = tmp_path / "outputs" / folder / ".lock"
    lock.parent.mkdir(parents=True)
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert f"a run is training in outputs/{folder}" in refused(planned)


def test_busy_gpus_stop_the_launch_if_it_would_use_them(planned: Launch, tmp_path: Path):
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "nvidia-smi").write_text(SMI)
    (tools / "nvidia-smi").chmod(0o755)
    (tmp_path / "end").touch()
    one = replace(planned, hosts=planned.hosts[:1])
    seen = {**planned.environment, "PATH": f"{tools}:{os.environ['PATH']}"}
    said = refused(replace(one, environment=seen))
    assert "alpha: in use: GPU 0 by /opt/other/python (pid 4242, 70000 MiB)" in said
    assert run(replace(one, environment=seen, force=True)) == 0
    assert run(replace(one, environment=seen | {"CUDA_VISIBLE_DEVICES": "1"})) == 0
    two = replace(planned, environment=seen | {"CUDA_VISIBLE_DEVICES": "1"}, force=True)
    assert "beta: has the GPUs of alpha" in refused(two)


def test_what_nccl_is_told_is_said_and_arrives(
    planned: Launch, place: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "end").touch()
    (tmp_path / "program.py").write_text('import os\nprint("has", os.environ["NCCL_DEBUG"], os.environ["NCCL_ALGO"])\n')
    hers = {**planned.environment, "NCCL_ALGO": "Ring"}
    tools = [
        place.tool(host, "nvidia-smi", SMI.replace("-aa", f"-{host}-a").replace("-bb", f"-{host}-b")) for host in NAMES
    ]
    try:
        assert run(replace(planned, environment=hers, force=True)) == 0
    finally:
        for tool in tools:
            tool.unlink()
    said = capsys.readouterr()
    assert sorted(said.out.splitlines()) == ["[alpha] has WARN Ring", "[beta] has WARN Ring"]
    assert "  NCCL_DEBUG=WARN  all hosts  errors are told with their reason\n" in said.err
    assert "  NCCL_ALGO=Ring   as given\n" in said.err


def test_a_port_that_is_taken_is_named(planned: Launch, place: Site):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"alpha: port {port} cannot be opened: " in refused(replace(planned, master_port=port))


def test_a_rendezvous_that_cannot_be_reached_is_named(planned: Launch):
    said = refused(replace(planned, master_address="nowhere.invalid"))
    assert "beta: does not reach alpha at nowhere.invalid port " in said


def test_ctrl_c_lets_all_hosts_end_in_their_own_way(
    planned: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "program.py").write_text(FAREWELL + WAITS)
    watching = when(lambda: up(tmp_path), lambda: os.kill(os.getpid(), signal.SIGINT))
    assert run(planned) == 130
    watching.join()
    said = capsys.readouterr()
    assert sorted(said.out.splitlines()) == ["[alpha] farewell of 0", "[beta] farewell of 1"]
    assert said.err.endswith("longtake launch: interrupted; all hosts have ended\n")


def test_a_launch_under_nohup_survives_the_end_of_its_terminal(
    planned: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    def hang_up() -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        time.sleep(0.2)
        (tmp_path / "end").touch()

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` does
    try:
        watching = when(lambda: up(tmp_path), hang_up)
        assert run(planned) == 0
        watching.join()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert "interrupted" not in capsys.readouterr().err


def test_the_second_ctrl_c_kills_what_will_not_stop(
    planned: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    heard: list[int] = []
    interrupt = Launcher._interrupt

    def count(self: Launcher) -> None:
        interrupt(self)
        heard.append(self.signals)

    monkeypatch.setattr(Launcher, "_interrupt", count)
    deaf = replace(planned, environment={**planned.environment, "DEAF": "1"}, grace=600.0)

    def interrupt_twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        until(lambda: heard == [1])  # else both may count as one
        os.kill(os.getpid(), signal.SIGINT)

    watching = when(lambda: up(tmp_path), interrupt_twice)
    assert run(deaf) == 130
    watching.join()
    said = capsys.readouterr().err
    assert "stopping all hosts, which have 600 s to save" in said
    assert "killing what runs on all hosts" in said


def test_a_secret_is_on_no_command_line(planned: Launch, place: Site, tmp_path: Path):
    seen: list[bytes] = []

    def look() -> None:
        for number in processes_of_launches(place):
            seen.append(b" ".join(words_of(number)))
        (tmp_path / "end").touch()

    watching = when(lambda: up(tmp_path), look)
    assert run(replace(planned, environment={**planned.environment, "HF_TOKEN": "hf_hush"})) == 0
    watching.join()
    assert len(seen) >= 6
    assert not [words for words in seen if b"hf_hush" in words]


@pytest.mark.parametrize("victim", ["longtake-host", "torch.distributed.run"])
def test_nothing_is_left_when_something_on_a_host_is_killed(
    planned: Launch, place: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str], victim: str
):
    watching = when(lambda: up(tmp_path), lambda: os.kill(programs(place, victim)[0], signal.SIGKILL))
    assert run(planned) == (1 if victim == "longtake-host" else 137)
    watching.join()
    said = capsys.readouterr().err
    assert "has failed; stopping the others" in said
    assert ("the connection was lost" if victim == "longtake-host" else "torchrun ended with SIGKILL") in said


def test_a_lost_connection_ends_the_launch_and_what_is_said_then_is_kept_on_the_host(
    planned: Launch, place: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "program.py").write_text(FAREWELL + WAITS)

    def cut() -> None:
        (number,) = [number for number in programs(place, "ssh") if b"beta" in words_of(number)]
        os.kill(number, signal.SIGKILL)

    watching = when(lambda: up(tmp_path), cut)
    assert run(planned) == 1
    watching.join()
    wait_for_end(place, 60)
    assert "beta: the connection was lost" in capsys.readouterr().err
    assert b"farewell of 1\n" in [log.read_bytes() for log in place.jobs.glob("*.log")]


def test_a_host_that_hears_nothing_any_more_stops(
    planned: Launch, place: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """As when the network is lost: nobody closes the connection."""
    monkeypatch.setattr("longtake.cluster.launch._PATIENCE_SECONDS", 10.0)
    monkeypatch.setattr("longtake.cluster.launch._BEAT_SECONDS", 0.2)

    left = []

    def freeze() -> None:
        (ssh,) = [number for number in programs(place, "ssh") if b"beta" in words_of(number)]
        os.kill(ssh, signal.SIGSTOP)
        try:
            left.append(len(programs(place, "program.py")))
            until(lambda: len(programs(place, "program.py")) <= 2)
            left.append(len(programs(place, "program.py")))
        finally:
            os.kill(ssh, signal.SIGCONT)

    watching = when(lambda: up(tmp_path), freeze)
    assert run(planned) == 1
    watching.join()
    assert left == [4, 2]  # on each host torchrun's stand-in and the worker
    assert "beta has failed; stopping the others" in capsys.readouterr().err
