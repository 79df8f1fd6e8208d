"""`longtake nodes` and `longtake stop` over two SSH servers on this machine, with small programs in nvidia-smi's place.

`stop --all` over a connection only to servers that see no processes but their own: it would end whatever this user
trains on the machine of the tests.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from longtake.cluster import node
from longtake.cluster.arguments import Host
from longtake.cluster.connection import Connections
from longtake.cluster.launch import Launch, Launcher
from longtake.cluster.machine import family, processes
from longtake.cluster.nodes import Nodes, RunOnNode
from tests.cluster.servers import ALONE, ROOT, Site, site, start_launch
from tests.cluster.test_watch import WAITS, planned, run, until, up
from tests.train.runs import (
    PATIENCE_SECONDS,
    assert_one_sentence,
    finish,
    metrics,
    run_command,
    steps_saved,
    wait_until,
    write_config,
)

__all__ = ["planned"]
Capture = pytest.CaptureFixture[str]
SMI = """#!/bin/sh
case "$1" in
    *clocks_event*) echo 'Field "clocks_event_reasons.active" is not a valid field to query.'; exit 2;;
    *query-gpu*)
        echo "0, 697.50 W, 61, 70000 MiB, 81920 MiB, 100 %, 0, 1980 MHz, 1980 MHz, 0x0000000000000000"
        echo "1, 100.50 W, 84, 1024 MiB, 81920 MiB, 0 %, 3, 345 MHz, 1980 MHz, 0x0000000000000040";;
    *) echo 4242; echo 4243;;
esac
"""
LOST = "#!/bin/sh\necho 'Unable to determine the device handle for GPU1: GPU is lost.'\nexit 15\n"
DMESG = """#!/bin/sh
echo '[    1.000000] Linux version 6.1'
echo '[    2.500000] NVRM: Xid (PCI:0000:3b:00): 79, pid=77, GPU has fallen off the bus.'
echo '[    3.500000] NVRM: Xid (PCI:0000:3b:00): 79, pid=78, GPU has fallen off the bus.'
"""
REFUSED = "#!/bin/sh\necho 'dmesg: read kernel buffer failed: Operation not permitted' >&2\nexit 1\n"


@pytest.fixture
def tools(place: Site) -> Iterator[Site]:
    """`alpha` has two GPUs, of which one is hot, and errors in its log; the log of `beta` may not be read."""
    written = [place.tool("alpha", "nvidia-smi", SMI), place.tool("alpha", "dmesg", DMESG)]
    written.append(place.tool("beta", "dmesg", REFUSED))
    yield place
    for tool in written:
        tool.unlink()


def three(place: Site) -> str:
    """A file of the two hosts, and one at which nobody listens."""
    file = place.folder / "three"
    file.write_text("alpha\nbeta\nalpha:1025\n")
    return str(file)


def asked(place: Site) -> list[str]:
    return ["--ssh", place.ssh, "--python", sys.executable]


def test_the_table_has_a_line_for_each_node_also_for_one_that_does_not_answer(tools: Site, capsys: Capture):
    code, out, error = run_command(capsys, ["nodes", three(tools), *asked(tools)])
    assert (code, error) == (1, "")
    head, alpha, beta, away = out.splitlines()
    assert head.split("  ")[0] == "node"
    assert alpha.split()[:6] == ["alpha", "2", "399", "W", "84", "C"]
    for said in ("69/160 GiB", "345/1980 MHz too hot x1", "  3  ", "79 x2 (", "(2 other GPU programs)"):
        assert said in alpha
    assert beta.split()[:5] == ["beta", "-", "-", "-", "-"]
    assert " ?  " in beta
    assert "alpha:1025 " in away
    assert "cannot be reached: " in away
    assert "Connection refused" in away


def test_json_has_each_gpu_and_a_clock_that_is_ours(tools: Site, capsys: Capture):
    tools.tool("beta", "nvidia-smi", LOST)
    begun = time.monotonic()
    try:
        code, out, _ = run_command(capsys, ["nodes", three(tools), "--json", *asked(tools)])
    finally:
        (tools.folder / "beta-tools" / "nvidia-smi").unlink()
    took = time.monotonic() - begun
    assert code == 1
    alpha, beta, away = json.loads(out)
    assert [gpu["celsius"] for gpu in alpha["gpus"]] == [61, 84]
    assert [one["xid"] for one in alpha["xids"]] == [79, 79]
    assert alpha["programs"] == [4242, 4243]
    assert abs(alpha["clock_offset_seconds"]) <= took  # half the round trip of a question, as NTP has it
    assert beta["nvidia_smi"].endswith("GPU is lost.")
    assert beta["xids"] is None
    assert away.keys() == {"node", "fault"}


def test_a_node_that_hangs_holds_nobody_up(place: Site, monkeypatch: pytest.MonkeyPatch):
    waited, gather = list[set[int]](), Connections.gather

    def noted(self: object, kind: str, hosts: set[int], *args: object) -> object:
        waited.append(set(hosts))
        return gather(self, kind, hosts, *args)

    tools = [place.tool("alpha", "slow", f'#!/bin/sh\nexec {sys.executable} "$@"\n')]
    tools.append(place.tool("beta", "slow", "#!/bin/sh\nexec cat >/dev/null\n"))
    found = Nodes([Host("alpha"), Host("beta")], place.ssh.split(), "slow", {}, seconds=0.1)
    try:
        until(lambda: "alive" in found.ask_all({"do": "signal", "number": 0, "pids": []}, 0.2)[0])
        monkeypatch.setattr(Connections, "gather", noted)
        answers = found.ask_all({"do": "signal", "number": 0, "pids": []})
        assert waited == [{0}]  # and not for `beta`
        assert (answers[0]["alive"], answers[1]) == ([], {"fault": "no answer within 20 s"})
    finally:
        found.close()
        for tool in tools:
            tool.unlink()


def test_a_clock_that_is_ahead_is_seen(monkeypatch: pytest.MonkeyPatch, place: Site):
    def ahead(self: object, kind: str, hosts: set[int], seconds: float, *_: object) -> object:
        said, closed = gather(self, kind, hosts, seconds)
        for event in said.values():
            event.value.update({key: event.value[key] + 7.0 for key in ("received", "answered")})
        return said, closed

    gather = Connections.gather
    monkeypatch.setattr(Connections, "gather", ahead)
    found = Nodes([Host("alpha")], place.ssh.split(), sys.executable, {})
    begun = time.monotonic()
    answer = found.ask_all({"do": "signal", "number": 0, "pids": []})[0]
    took = time.monotonic() - begun
    found.close()
    assert abs(answer["clock_offset_seconds"] - 7) <= took


def test_stop_ends_the_run_and_no_other(planned: Launch, place: Site, tmp_path: Path, capsys: Capture):
    other = tmp_path / "train_other.py"
    other.write_text(WAITS)
    beside = subprocess.Popen([sys.executable, other.name], cwd=tmp_path, env={**os.environ, "RANK": "9"})
    launcher, codes = Launcher(replace(planned, name="to stop")), list[int]()
    launched = threading.Thread(target=lambda: codes.append(launcher.run()))
    launched.start()
    try:
        until(lambda: up(tmp_path) and (tmp_path / "up9").exists())
        code, out, _ = run_command(capsys, ["stop", str(place.hostfile), "--run", "gone", *asked(place)])
        assert code == 1
        assert "no run named gone (runs there: " in out
        assert "to stop" in out
        code, out, _ = run_command(capsys, ["stop", str(place.hostfile), "--run", "to stop", *asked(place)])
        assert code == 0
        assert "SIGTERM; SIGKILL after 300 s\nalpha: ended\n" in out
        launched.join(PATIENCE_SECONDS)
        assert (codes, launcher.ends()) == ([130], [])  # nothing that a launch would start again
        assert beside.poll() is None
    finally:
        beside.kill()
        beside.wait()
        (tmp_path / "end").touch()
        launched.join()


def test_what_does_not_hear_sigterm_is_killed(planned: Launch, place: Site, tmp_path: Path, capsys: Capture):
    deaf = replace(planned, name="deaf", environment={**planned.environment, "DEAF": "1"})
    launched = threading.Thread(target=run, args=(deaf,))
    launched.start()
    try:
        until(lambda: up(tmp_path))
        words = ["stop", str(place.hostfile), "--run", "deaf", "--grace", "0.5", *asked(place)]
        code, out, _ = run_command(capsys, words)
        assert (code, out.splitlines()[-1]) == (0, "alpha: ended")
    finally:
        launched.join()


def of_this_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes that this one has started are all that there are."""
    monkeypatch.setattr(node, "processes", lambda: {p: processes()[p] for p in family(processes(), [os.getpid()])})


def test_training_is_known_by_its_command_line_and_only_its_first_process_is_signalled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "train.py").write_text(
        "import os, subprocess, sys\n"
        "below = subprocess.Popen(['sleep', '60']) if sys.argv[1:2] == ['below'] else"
        " subprocess.Popen([sys.executable, 'train.py', 'below', *sys.argv[1:]])\n"
        "open('up' + str(os.getpid()), 'w').close()\n"
        "below.wait()\n"
    )
    of_this_test(monkeypatch)
    first = subprocess.Popen([sys.executable, "train.py", "mine.py"], cwd=tmp_path)
    try:
        until(lambda: len(list(tmp_path.glob("up*"))) == 2)
        (found,) = [one for one in node.runs()["runs"] if first.pid in [pid for pid, _ in one["pids"]]]
        assert len(found["pids"]) == 3  # and the one that is no training
        assert [pid for pid, _ in found["first"]] == [first.pid]
        assert node.signal(0, [[first.pid, 1]]) == {"alive": []}  # another process of that number
        assert node.signal(signal.SIGKILL, found["pids"])["alive"] == found["pids"]
        first.wait(PATIENCE_SECONDS)
        until(lambda: not node.signal(0, found["pids"])["alive"])
    finally:
        first.kill()


@pytest.mark.parametrize(
    ("words", "training"),
    [
        ("python3.11 -m longtake train run.py --lr 1", "train run.py --lr 1"),
        ("/v/bin/python /v/bin/longtake train run.py", "train run.py"),
        ("python -u /v/bin/torchrun --nproc_per_node 8 -m longtake train run.py", "train run.py"),
        ("python -m torch.distributed.run --nnodes 2 scripts/train.py c.py", "scripts/train.py c.py"),
        ("python /v/bin/accelerate launch --x y scripts/cogvideox_fun/train_lora.py --a", None),
        ("python -m longtake launch --nproc-per-node 2 -- train run.py", "train run.py"),
        ("python -m longtake launch --hostfile hosts -- train run.py", ""),
        ("python -m longtake generate run", ""),
        ("python -m longtake stop hosts --run train", ""),
        ("python -u my_train.py --x", "my_train.py --x"),
        ("python -m black train.py", ""),
        ("python -c train.py", ""),
        ("python serve.py train.py", ""),
        ("vim train.py", ""),
        ("ssh node longtake train x", ""),
        ("", ""),
    ],
)
def test_command_lines_of_training(words: str, training: str | None):
    expected = "scripts/cogvideox_fun/train_lora.py --a" if training is None else training
    assert node._training(words.split()) == expected.split()


class Told:
    """Two nodes with a training run and a generation each, and no connection."""

    labels = ("node1", "node2")
    stopped: tuple[RunOnNode, ...] = ()

    def __init__(self, *_: object) -> None:
        pass

    def ask_all(self, order: object) -> dict[int, dict[str, object]]:
        return {
            number: {
                "machine": str(number),
                "runs": [
                    {"name": name, "words": [verb], "pids": [[pid, 1]], "first": [[pid, 1]]}
                    for name, verb, pid in (("one", "train", 7), ("two", "generate", 8))
                ],
            }
            for number in range(2)
        }

    def stop(self, runs: list[RunOnNode], grace: float) -> set[int]:
        Told.stopped = tuple(runs)
        return set()

    def close(self) -> None:
        pass


def test_all_means_training_alone_and_is_asked_once(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "hosts").write_text("node1\nnode2\n")
    monkeypatch.setattr("longtake.cluster.nodes.Nodes", Told)
    monkeypatch.setattr(Told, "stopped", ())
    words = ["stop", str(tmp_path / "hosts")]
    monkeypatch.setattr("sys.stdin", open(os.devnull))  # noqa: SIM115
    code, _, error = run_command(capsys, [*words, "--all"])  # nobody to ask
    assert (code, "--yes" in error) == (2, True)
    assert not Told.stopped
    assert run_command(capsys, [*words, "--all", "--yes"])[0] == 0
    assert [(one.node, one.name) for one in Told.stopped] == [(0, "one"), (1, "one")]
    for both in ([], ["--all", "--run", "one"]):
        assert_one_sentence(*run_command(capsys, [*words, *both])[::2], "name one run with --run NAME, or all")


@pytest.mark.cluster
@pytest.mark.skipif(os.getuid() != 0, reason="process namespaces need root")
def test_all_training_runs_end_and_nothing_else_does(
    tmp_path: Path, clips: Path, capsys: Capture, found: dict[str, object]
):
    one, two = (write_config(tmp_path / name, clips, exp_name=name, max_steps=10**6) for name in ("one", "two"))
    (tmp_path / "site").mkdir()
    with site(tmp_path / "site", inside=lambda name: ALONE) as place:

        def beside(host: str, words: str) -> subprocess.Popen[bytes]:
            line = f"cd {tmp_path} && PYTHONPATH={ROOT} OMP_NUM_THREADS=1 exec {words}"
            return subprocess.Popen([*place.ssh.split(), host, line], stdout=subprocess.PIPE)

        trains = beside("alpha", f"{sys.executable} -m longtake train {two}")
        others = [
            beside("alpha", "sleep 999"),
            beside("beta", f"{sys.executable} -c 'import time; time.sleep(999)' train"),
        ]
        launched = start_launch(place, "train", one, folder=tmp_path)
        folders = [tmp_path / name / "outputs" / name for name in ("one", "two")]
        wait_until(launched, lambda: all(map(metrics, folders)))
        code, out, error = run_command(capsys, ["stop", str(place.hostfile), "--all", "--yes", *asked(place)])
        assert (code, error) == (0, "")
        listed = [line.split()[:2] for line in out.splitlines()[1:4]]
        assert sorted(listed) == [["alpha", "one"], ["alpha", "two"], ["beta", "one"]], out
        assert finish(launched)[0] == trains.wait(PATIENCE_SECONDS) == 130
        assert all(map(steps_saved, folders))
        assert [other.poll() for other in others] == [None, None]
        for other in others:
            other.kill()
    found["stop --all"] = {"ended": listed, "each_saved_at_step": [steps_saved(folder)[-1] for folder in folders]}


def test_the_old_words_run_as_written(tools: Site, tmp_path: Path):
    (tmp_path / "ssh").write_text(f'#!/bin/sh\nexec {Path("/usr/bin/ssh")} -F {tools.folder}/ssh_config "$@"\n')
    (tmp_path / "longtake").write_text('#!/bin/sh\necho longtake "$@"\n')
    for name in ("ssh", "longtake"):
        (tmp_path / name).chmod(0o755)
    variables = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    three(tools)

    def said(*words: object) -> str:
        done = subprocess.run(
            [str(word) for word in words], env=variables, capture_output=True, text=True, timeout=PATIENCE_SECONDS
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    table = [line.split() for line in said(sys.executable, ROOT / "nvtop_all.py", tools.folder / "three").splitlines()]
    assert table[0] == ["Node", "GPU", "Processes", "Mean", "Power", "Consumption", "(W)"]
    assert table[1:] == [
        ["0", "alpha", "2", "399.00000"],
        ["1", "beta", "Failed", "Failed"],
        ["2", "alpha:1025", "Failed", "Failed"],
    ]
    assert said(ROOT / "kill_process.sh", "nodes.txt") == "longtake stop nodes.txt --all\n"
