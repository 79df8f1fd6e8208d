"""`longtake health`: who is slow, what Prometheus is told, and that board and alerts ask for nothing else."""

from __future__ import annotations

import json
import re
import select
import shutil
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import numpy as np
import pytest

from longtake.cluster.health import METRICS, MONITORING, RunHealth, exposition, node_samples
from longtake.cluster.metrics_server import exporter
from longtake.cluster.scores import Scores
from longtake.contracts import UserError
from tests.cluster.servers import Site
from tests.train.runs import PATIENCE_SECONDS, run_command

RANKS, SLOW, EVERY, LAST = 192, 77, 10, 100
GPU = {
    "index": 0.0, "power_watts": 690.0, "celsius": 61.0, "memory_mib": 1024.0, "memory_total_mib": 81920.0,
    "utilization_percent": 98.0, "ecc_uncorrected": 2.0, "clock_mhz": 990.0, "clock_max_mhz": 1980.0,
    "throttling": 0x44,
}  # fmt: skip
NODE = {
    "gpus": [GPU, dict.fromkeys(GPU)], "programs": [], "disk_free_bytes": 1, "disk_bytes": 4, "runs": [],
    "xids": [{"xid": 79, "gpu": "PCI:0000:19:00", "seconds_ago": age} for age in (90.0, 30.0)],
    "clock_offset_seconds": -0.25,
}  # fmt: skip


class _Nodes:
    labels = ("node1", "node2")

    def ask_all(self, order: dict[str, Any], seconds: float) -> dict[int, dict[str, Any]]:
        return {0: NODE, 1: {"fault": "no answer"}}


def _times(step: int, noise: np.random.Generator, slow_from: int = 0) -> list[float]:
    """Seconds of many ranks that differ by a tenth from step to step, of which one is slowed by 20 %."""
    times = noise.normal(1.0, 0.1, RANKS).clip(0.5)
    times[SLOW] *= 1.2 if step >= slow_from else 1.0
    return times.tolist()


@pytest.mark.parametrize("seed", range(5))
def test_a_rank_slowed_by_a_fifth_tops_the_list_within_50_steps(seed: int) -> None:
    noise, scores = np.random.default_rng(seed), Scores()
    for step in range(EVERY, 351, EVERY):
        # What a rank gives is a median of its own over the steps since the last time.
        scores.add(step, np.median([_times(step, noise, slow_from=301) for _ in range(EVERY)], axis=0).tolist())
    relative, individual = scores.relative(), scores.individual()
    assert np.argmin(relative) == np.argmin(individual) == SLOW
    assert relative[SLOW] == pytest.approx(1 / 1.2, abs=0.12)  # the fastest of many is fast by chance too
    assert individual[SLOW] == pytest.approx(1 / 1.2, abs=0.08)
    assert max(relative) == 1.0


def test_scores_are_those_of_the_definition() -> None:
    scores = Scores()
    for step, times in ((10, [1.0, 2.0]), (20, [1.0, 2.0]), (30, [4.0, 2.0])):
        scores.add(step, times)
    assert (scores.relative(), scores.individual()) == ([1.0, 0.5], [1.0, 1.0])  # medians: 1 and 2
    scores.add(75, [4.0, 2.0])  # those of steps 10 and 20 are past
    assert (scores.relative(), scores.individual()) == ([0.5, 1.0], [0.25, 1.0])
    scores.add(80, [1.0])  # at another number of ranks
    assert (scores.relative(), scores.individual()) == ([1.0], [1.0])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / 'a "run"'
    folder.mkdir()
    hosts = {"node1": RANKS // 2, "node2": RANKS // 2}
    starts = [
        {"time": 1.0, "step": 0, "hosts": hosts, "device": "cuda", "reports": "none"},
        {"time": 2.0, "ended": "failed", "host": "node2", "why": "NCCL"},
        {"time": 3.0, "step": 0, "hosts": hosts, "device": "cuda", "reports": "none"},
    ]
    (folder / "launches.jsonl").write_text("".join(json.dumps(line) + "\n" for line in starts))
    (folder / "goodput.json").write_text(json.dumps({"steps": 90.0, "wait": 10.0, "time": 5.0}))
    (folder / "quarantine.jsonl").write_text("{}\n{}\n")
    noise = np.random.default_rng(0)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, LAST + 1):
            line: dict[str, Any] = {"step": step, "loss": 0.5, "seconds": 2.0, "wait": 0.1}
            if step % EVERY == 0:
                waits = [0.0] * (RANKS - 1) + [0.5]
                line |= {"ranks": {"seconds": _times(step, noise), "wait": waits, "tflop": 3.0}, "watts": {"node1": 5}}
            file.write(json.dumps(line | ({"skipped": True} if step == 7 else {})) + "\n")
        file.write('{"step": 101, "lo')
    return folder


def _figures(samples: Iterator[Any]) -> dict[str, float]:
    """By name and labels: `longtake_seconds part="wait"`."""
    found = re.findall(r'^(\w+)\{run="r",?(.*)\} (\S+)$', exposition(samples, "r"), re.MULTILINE)
    return {f"{name} {labels}".strip(): float(value) for name, labels, value in found}


def test_the_figures_of_a_run_are_those_of_its_files(run: Path) -> None:
    watched = RunHealth(run)
    found = _figures(watched.samples())
    assert found["longtake_step"] == LAST
    assert found["longtake_step_seconds"] == 2.0
    assert found["longtake_wait_ratio"] == 0.25  # of the rank that waits most
    assert found["longtake_goodput_ratio"] == 0.9
    assert found['longtake_seconds part="wait"'] == 10.0
    assert (found["longtake_skipped_steps"], found["longtake_lost_samples"]) == (1, 2)
    assert (found['longtake_launches ended="failed"'], found['longtake_launches ended="none"']) == (1, 1)
    assert found["longtake_finished"] == 0
    ranked = [name for name in found if "relative_score" in name]
    assert ranked[0] == f'longtake_rank_relative_score rank="{SLOW}",host="node1"'
    assert len(ranked) == RANKS
    with (run / "metrics.jsonl").open("a") as file:
        file.write('ss": 0.4}\n')
    assert _figures(watched.samples())["longtake_step"] == 101  # the line that was being written
    (run / "metrics.jsonl").write_text('{"step": 3, "loss": 1.0, "seconds": 1.0, "wait": 0.0}\n')
    found = _figures(watched.samples())  # taken back to a checkpoint
    assert (found["longtake_step"], found["longtake_skipped_steps"]) == (3, 0)
    assert not any("rank" in name for name in found)


def test_a_node_that_does_not_answer_costs_its_own_figures_only() -> None:
    found = _figures(node_samples(_Nodes(), "/"))
    assert (found['longtake_node_up node="node1"'], found['longtake_node_up node="node2"']) == (1, 0)
    assert [name for name in found if "node2" in name] == ['longtake_node_up node="node2"']
    on = 'node="node1",gpu="0"'
    assert found[f"longtake_gpu_memory_bytes {on}"] == 2**30
    assert found[f"longtake_gpu_clock_ratio {on}"] == 0.5
    assert {name for name, value in found.items() if "throttled" in name and value} == {
        f'longtake_gpu_throttled {on},reason="power cap"',
        f'longtake_gpu_throttled {on},reason="too hot"',
    }
    assert sum("xid" in name for name in found) == 1  # the last of its kind


def test_figures_come_from_real_nodes(run: Path, place: Site, capsys: Any) -> None:
    words = ["--hosts", place.hostfile, "--ssh", place.ssh, "--python", sys.executable]
    code, said, error = run_command(capsys, ["health", run, "--once", *words])
    assert (code, error) == (0, "")
    for node in ("alpha", "beta"):
        assert re.search(rf'^longtake_node_up\{{run=".*",node="{node}"\}} 1$', said, re.MULTILINE)
        assert re.search(rf'^longtake_disk_free_ratio\{{run=".*",node="{node}"\}} 0\.\d+$', said, re.MULTILINE)


def test_board_and_alerts_ask_for_what_is_told_and_all_that_has_a_meaning_is_told(run: Path) -> None:
    samples = [*RunHealth(run).samples(), *node_samples(_Nodes(), "/")]
    assert {sample.name for sample in samples} == METRICS.keys()
    labels = {sample.name: {"run", *sample.labels} for sample in samples}
    board = json.loads((MONITORING / "board.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked += [str(variable["query"]) for variable in board["templating"]["list"]]
    asked += re.findall(r"expr: (.*?)\n +(?:for|labels):", (MONITORING / "alerts.yaml").read_text(), re.DOTALL)
    assert len(asked) > 30
    names = set(re.findall(r"\blongtake_\w+", " ".join(asked)))
    assert names <= METRICS.keys()
    assert len(names) > 20
    for name, inside in re.findall(r"(longtake_\w+)\{(.*?)\}", " ".join(asked)):
        assert set(re.findall(r"(\w+)[=!]", inside)) <= labels[name], name


def test_prometheus_is_answered_on_loopback(run: Path) -> None:
    watched = RunHealth(run)
    with exporter("127.0.0.1:0", lambda: exposition(watched.samples(), run.name)) as server:
        address = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            with urllib.request.urlopen(f"{address}/metrics", timeout=PATIENCE_SECONDS) as answer:
                assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
                text = answer.read().decode()
            with pytest.raises(HTTPError, match="404"):
                urllib.request.urlopen(f"{address}/", timeout=PATIENCE_SECONDS)
        finally:
            server.shutdown()
    assert '# TYPE longtake_step gauge\nlongtake_step{run="a \\"run\\""} 100\n' in text


def test_exporter_slow_clients_hold_up_nobody_and_are_closed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = RunHealth(run)
    with exporter("127.0.0.1:0", lambda: exposition(watched.samples(), run.name)) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            slow = [socket.create_connection(server.server_address[:2], PATIENCE_SECONDS) for _ in range(100)]
            for client in slow:
                client.send(b"GET /metrics HTTP/1.1\r\nX: ")
            url = f"http://127.0.0.1:{server.server_port}/metrics"
            with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as answer:
                assert b"longtake_step{" in answer.read()
            monkeypatch.setattr(server, "client_seconds", 0.05)
            assert all(_is_closed_while_it_sends(client) for client in slow)
        finally:
            server.shutdown()


def _is_closed_while_it_sends(client: socket.socket) -> bool:
    """A byte at a time, which no limit on the time between two bytes would end."""
    with client:
        for _ in range(int(PATIENCE_SECONDS / 0.01)):
            try:
                client.send(b"x")
                if select.select([client], [], [], 0.01)[0]:
                    return client.recv(1) == b""
            except OSError:
                return True
    return False


def test_mistakes_are_told_in_a_sentence(run: Path, tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(UserError, match=r"--listen 9400x: .*; write HOST:PORT"):
        exporter("9400x", str)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no run has begun its steps there"):
        RunHealth(tmp_path / "empty")
    code, said, _ = run_command(capsys, ["health", run, "--once"])
    assert code == 0
    assert "longtake_goodput_ratio" in said
    code, _, _ = run_command(capsys, ["health", run, "--files", tmp_path / "files"])
    assert {path.name for path in (tmp_path / "files").iterdir()} == {"alerts.yaml", "board.json"}


def test_every_alert_fires_when_it_should_and_only_then() -> None:
    played = Path(__file__).with_name("alerts_test.yaml")
    alerts = set(re.findall(r"alert: (\w+)", (MONITORING / "alerts.yaml").read_text()))
    assert alerts == set(re.findall(r"alertname: (\w+)", played.read_text()))
    _promtool("test", "rules", played)


def test_prometheus_reads_the_text(run: Path) -> None:
    samples = [*RunHealth(run).samples(), *node_samples(_Nodes(), "/")]
    _promtool("check", "metrics", stdin=exposition(samples, "a run"))


def _promtool(*words: object, stdin: str = "") -> None:
    if shutil.which("promtool") is None:
        pytest.skip("no promtool here; `make cluster` installs it")
    done = subprocess.run(
        ["promtool", *map(str, words)], input=stdin, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr
