"""Two processes write into one run of Weights & Biases, whose server is a stand-in that keeps what it is sent."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import longtake
from longtake.track.trackers import offline_line
from tests.served import Handler, served

ENTITY = {"id": "ZQ==", "name": "e"}
RUN = {
    **{"id": "cnVu", "name": "r", "displayName": "r", "config": "{}", "sweepName": None, "description": None},
    **{"project": {"id": "cA==", "name": "p", "entity": ENTITY}},
    **{"historyLineCount": 0, "eventsLineCount": 0, "logLineCount": 0},
}
ANSWER = {
    "viewer": {"id": "dQ==", "entity": "e", "username": "u", "flags": "{}", "teams": {"edges": []}},
    "serverInfo": {"cliVersionInfo": {}, "latestLocalVersionInfo": None, "features": []},
    "upsertBucket": {"bucket": RUN, "inserted": True},
    "model": {"bucket": None, "id": "x", "entity": ENTITY, "name": "p"},
    "createRunFiles": {"runID": "cnVu", "uploadHeaders": [], "files": []},
}
WRITER = """
    import sys
    from pathlib import Path
    from longtake.track.trackers import TrackedRun, Trackers; from longtake.track.config import TrackingConfig

    run, who = Path(sys.argv[1]), sys.argv[2]
    own = TrackingConfig(tensorboard=False, wandb=True, wandb_shared=True)
    watches = {"joins": run} if who == "watch" else {}
    trackers = Trackers(TrackedRun(run / "watch" if watches else run, own, **watches))
    print("ready", flush=True)
    for step in map(int, sys.argv[3:]):
        trackers.log(step, {f"{who}/loss": 1 / step, f"{who}/loss/level 0.3": 0.1} if watches else {"loss": 1 / step})
    input()
    trackers.close()
"""


SYNCED = ("wandb/offline-run-*", "watch/wandb/offline-run-*")  # in a run's folder


class Server(Handler):
    sent: list[tuple[str, dict[str, Any]]]
    rows: dict[int, dict[str, Any]]  # of the run's history, by their place in it: as on the server, later ones replace

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        kind = "query" if self.path == "/graphql" else "stream" if self.path.endswith("/file_stream") else ""
        said = json.loads(body) if kind else {}
        if kind:
            self.sent.append((kind, said))
        history = said.get("files", {}).get("wandb-history.jsonl", {"offset": 0, "content": []})
        self.rows.update(enumerate(map(json.loads, history["content"]), history["offset"]))
        data: dict[str, Any] = ANSWER
        if "RunResumeStatus" in said.get("query", "") and self.rows:
            data = {**ANSWER, "model": {**ANSWER["model"], "bucket": {**RUN, **self.counts()}}}
        answer = json.dumps({"data": data} if kind == "query" else {}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def counts(self) -> dict[str, Any]:
        """A server's answer for a run that has rows."""
        last = json.dumps([json.dumps(self.rows[max(self.rows)])])
        own = {"historyLineCount": max(self.rows) + 1, "historyTail": last, "eventsTail": "[]"}
        return own | {"summaryMetrics": "{}", "tags": [], "notes": None, "wandbConfig": '{"t": 1}'}


@pytest.fixture
def address() -> Iterator[str]:
    Server.sent, Server.rows = [], {}
    with served(Server) as address:
        yield address


def write(address: str, *words: object) -> subprocess.Popen[str]:
    own = {"WANDB_BASE_URL": address, "WANDB_API_KEY": "k" * 40, "WANDB_SILENT": "true", "WANDB_DISABLE_GIT": "true"}
    own |= {"PYTHONPATH": str(Path(longtake.__file__).parents[1])}
    program = WRITER.replace("wandb_shared=True", f"wandb_shared={'WANDB_MODE' not in os.environ}")
    command = [sys.executable, "-c", textwrap.dedent(program), *map(str, words)]
    return subprocess.Popen(command, env=alone(own), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def alone(own: dict[str, str]) -> dict[str, str]:
    """The environment without the W&B service of this process, which an earlier test may have started: processes that
    share one cannot write into the same run."""
    return {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"} | own


@pytest.mark.slow
def test_no_step_of_either_is_lost_and_both_say_the_same_of_all_axes(address: str, tmp_path: Path) -> None:
    trains = write(address, tmp_path / "run", "train", 1, 2, 3)
    assert trains.stdout is not None
    assert trains.stdout.readline() == "ready\n"
    watches = write(address, tmp_path / "run", "watch", 300, 100, 200)  # newest first: steps go back
    for writer in (watches, trains):
        writer.communicate("\n", timeout=150)
        assert writer.returncode == 0
    streams = [of for kind, of in Server.sent if kind == "stream"]
    lines = [
        json.loads(line)
        for of in streams
        for line in of.get("files", {}).get("wandb-history.jsonl", {}).get("content", [])
    ]
    assert [line["watch/step"] for line in lines if "watch/loss" in line] == [300, 100, 200]
    assert [line["global_step"] for line in lines if "loss" in line] == [1, 2, 3]
    assert sum(bool(of.get("complete")) for of in streams) == 1  # only who trains ends the run
    configs = [
        json.loads(of["variables"]["config"]) for kind, of in Server.sent if of.get("variables", {}).get("config")
    ]
    said = [axes_of(config["_wandb"]["value"]["m"]) for config in configs]
    whole = [axes for axes in said if axes]
    assert len(whole) >= 2
    assert all(axes == whole[0] for axes in whole)
    for name, axis in {
        "loss/256px": "global_step",
        "wait_share": "global_step",
        "watch/loss/level 0.3": "watch/step",
    }.items():
        assert [of for pattern, of in whole[0].items() if name.startswith(pattern)] == [axis]


@pytest.mark.slow
def test_offline_folders_of_training_and_watching_sync_without_replacing_rows(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    monkeypatch.setenv("WANDB_MODE", "offline")
    for words in (("train", 1, 2, 3), ("watch", 3, 2), ("train", 4, 5)):
        writer = write(address, run, *words)
        writer.communicate("\n", timeout=150)
        assert writer.returncode == 0
        time.sleep(1.1)  # W&B names folders by the second
    assert Server.sent == []
    monkeypatch.delenv("WANDB_MODE")
    folders = [path for pattern in SYNCED for path in sorted(run.glob(pattern))]
    assert len(folders) == 3
    own = {"WANDB_BASE_URL": address, "WANDB_API_KEY": "k" * 40}
    command = [Path(sys.executable).parent / "wandb", "sync", "--yes", *folders]
    subprocess.run(command, env=alone(own), cwd=tmp_path, check=True, capture_output=True, timeout=150)
    rows = [Server.rows[place] for place in sorted(Server.rows)]
    assert sorted(row["global_step"] for row in rows if "loss" in row) == [1, 2, 3, 4, 5]
    assert [row["watch/step"] for row in rows if "watch/loss" in row] == [3, 2]
    assert len(rows) == 7


def test_command_of_the_upload_has_all_folders_that_are_there(tmp_path: Path) -> None:
    assert offline_line(tmp_path) == ""
    for number, pattern in enumerate(SYNCED, start=1):
        (tmp_path / pattern.replace("*", "x")).mkdir(parents=True)
        command = f"wandb sync {' '.join(f'{tmp_path}/{one}' for one in SYNCED[:number])}"
        assert offline_line(tmp_path).endswith(command)


def test_docs_name_the_folders_that_are_synced() -> None:
    text = (Path(__file__).parents[2] / "docs" / "watch.md").read_text(encoding="utf-8")
    assert f"wandb sync {' '.join(f'outputs/NAME/{pattern}' for pattern in SYNCED)}" in text


def axes_of(metrics: list[dict[str, Any]]) -> dict[str, str]:
    """The axis of each pattern, in W&B's numbers: 1 a name, 2 a pattern, 5 the place of the axis, from 1."""
    return {of["2"].removesuffix("*"): metrics[of["5"] - 1]["1"] for of in metrics if "2" in of}
