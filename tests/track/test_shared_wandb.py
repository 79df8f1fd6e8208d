"""Two processes write into one run of Weights & Biases, whose server is a stand-in that keeps what it is sent."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import longtake
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
    from longtake.track import TrackedRun, Trackers, TrackingConfig

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


class Server(Handler):
    sent: list[tuple[str, dict[str, Any]]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        kind = "query" if self.path == "/graphql" else "stream" if self.path.endswith("/file_stream") else ""
        if kind:
            self.sent.append((kind, json.loads(body)))
        answer = json.dumps({"data": ANSWER} if kind == "query" else {}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)


@pytest.fixture
def address() -> Iterator[str]:
    Server.sent = []
    with served(Server) as address:
        yield address


def write(address: str, *words: object) -> subprocess.Popen[str]:
    own = {"WANDB_BASE_URL": address, "WANDB_API_KEY": "k" * 40, "WANDB_SILENT": "true", "WANDB_DISABLE_GIT": "true"}
    own |= {"PYTHONPATH": str(Path(longtake.__file__).parents[1])}
    command = [sys.executable, "-c", textwrap.dedent(WRITER), *map(str, words)]
    return subprocess.Popen(
        command, env={**os.environ, **own}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


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


def axes_of(metrics: list[dict[str, Any]]) -> dict[str, str]:
    """The axis of each pattern, in W&B's numbers: 1 a name, 2 a pattern, 5 the place of the axis, from 1."""
    return {of["2"].removesuffix("*"): metrics[of["5"] - 1]["1"] for of in metrics if "2" in of}
