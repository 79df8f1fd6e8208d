"""Numbers are written once, exactly, and taken back when a run goes on from an earlier step."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import struct
import subprocess
import sys
import textwrap
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import longtake
from longtake.contracts import UserError
from longtake.track import trackers as module
from longtake.track.config import TrackingConfig
from longtake.track.trackers import METRICS_FILE, TrackedRun, Trackers, read_lines
from tests import forks
from tests.train.runs import PATIENCE_SECONDS

pytestmark = pytest.mark.usefixtures("fresh_wandb")

ROOT = str(Path(longtake.__file__).parents[1])


def opened(run: Path, resume_step: int | None = None, enabled: bool = True, **keys) -> closing[Trackers]:
    return closing(Trackers(TrackedRun(run, TrackingConfig(**keys), {"lr": 0.1}, resume_step), enabled))


def plain(run: Path, resume_step: int | None = None) -> closing[Trackers]:
    return opened(run, resume_step, tensorboard=False)


def steps_of(run: Path) -> list[int]:
    return [line["step"] for line in read_lines(run / METRICS_FILE)]


def test_a_line_gives_back_the_bits_of_its_numbers(tmp_path):
    loss = struct.unpack("<d", bytes.fromhex("0f5bc9a17e26b53f"))[0]
    with plain(tmp_path) as trackers:
        trackers.log_line({"step": 1, "loss": loss, "bits": loss.hex(), "digest": "00ff", "nested": {"x": [1e-320]}})
        trackers.log_line({"step": 2, "loss": float("nan"), "norm": [float("inf"), float("-inf")]})
    first, second = read_lines(tmp_path / METRICS_FILE)
    assert (
        struct.pack("<d", first["loss"]) == struct.pack("<d", float.fromhex(first["bits"])) == struct.pack("<d", loss)
    )
    assert first["nested"] == {"x": [1e-320]}
    assert second["loss"] == "NaN"
    assert [float(text) for text in second["norm"]] == [float("inf"), float("-inf")]


def test_a_killed_process_loses_no_line(tmp_path):
    program = """
        import os, signal, sys
        from pathlib import Path
        from longtake.track.trackers import TrackedRun, Trackers; from longtake.track.config import TrackingConfig
        trackers = Trackers(TrackedRun(Path(sys.argv[1]), TrackingConfig(tensorboard=False)))
        for step in range(1, 6):
            trackers.log_line({"step": step})
        os.kill(os.getpid(), signal.SIGKILL)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    killed = forks.run(command)
    assert killed.returncode == -9, killed.stderr
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5]


def test_lines_after_the_resumed_step_are_dropped_and_written_anew(tmp_path):
    with plain(tmp_path) as trackers:
        for step in range(1, 9):
            trackers.log_line({"step": step, "life": 1})
    with plain(tmp_path, resume_step=5) as trackers:
        for step in range(6, 8):
            trackers.log_line({"step": step, "life": 2})
    lines = read_lines(tmp_path / METRICS_FILE)
    assert [(line["step"], line["life"]) for line in lines] == [(n, 1) for n in range(1, 6)] + [(6, 2), (7, 2)]
    assert [path.name for path in tmp_path.iterdir()] == [METRICS_FILE]


def test_a_line_cut_off_in_mid_write_does_not_spoil_the_next(tmp_path):
    with plain(tmp_path) as trackers:
        trackers.log_line({"step": 1})
    with (tmp_path / METRICS_FILE).open("a") as stream:
        stream.write('{"step": 2, "lo')
    with plain(tmp_path, resume_step=None) as trackers:
        trackers.log_line({"step": 2})
    assert steps_of(tmp_path) == [1, 2]


def test_opening_without_a_resumed_step_keeps_all_lines(tmp_path):
    for step in (1, 2):
        with plain(tmp_path) as trackers:
            trackers.log_line({"step": step})
    assert steps_of(tmp_path) == [1, 2]


def test_other_ranks_write_nothing(tmp_path):
    with opened(tmp_path / "run", enabled=False) as trackers:
        trackers.log(1, {"loss": 1.0})
        trackers.log_line({"step": 1})
    assert not (tmp_path / "run").exists()


def tensorboard_of(run: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # imports boto where it is

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return events


def test_tensorboard_gets_numbers_and_is_purged_after_a_resume(tmp_path):
    with opened(tmp_path) as trackers:
        for step in range(1, 7):
            trackers.log(step, {"train/loss": 1.0})
    with opened(tmp_path, resume_step=4) as trackers:
        trackers.log(5, {"train/loss": 2.0})
    events = tensorboard_of(tmp_path)
    found = [(scalar.step, scalar.value) for scalar in events.Scalars("train/loss")]
    assert found == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0), (5, 2.0)]


def test_wandb_variable_without_a_value_it_takes_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "banana")
    with pytest.raises(UserError, match="WANDB_MODE = 'banana'"):
        opened(tmp_path, tensorboard=False, wandb=True)
    importlib.import_module("wandb").teardown()  # it reads the environment once per process


def test_weights_and_biases_runs_offline_and_a_restart_is_the_same_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_BASE_URL", "")  # empty: unset
    monkeypatch.setenv("WANDB_SILENT", "true")
    options = {"tensorboard": False, "wandb": True, "wandb_project": "p"}
    with opened(tmp_path / "run", **options) as trackers:
        trackers.log(1, {"train/loss": 0.5})
    run_id = (tmp_path / "run" / "wandb_id.txt").read_text()
    with opened(tmp_path / "run", resume_step=1, **options) as trackers:
        trackers.log(2, {"train/loss": 0.25})
    written = list((tmp_path / "run" / "wandb").glob(f"offline-run-*/run-{run_id}.wandb"))
    assert len(written) >= 1
    content = b"".join(path.read_bytes() for path in written)
    assert b"train/loss" in content
    assert b"global_step" in content


def test_who_watches_a_run_writes_into_its_wandb_run_on_an_axis_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run, options = tmp_path / "run", {"tensorboard": False, "wandb": True}
    with opened(run, **options) as trackers:
        trackers.log(1, {"train/loss": 0.5})
    watched = TrackedRun(run / "watch", TrackingConfig(**options), joins=run)
    with closing(Trackers(watched)) as trackers:
        trackers.log(1, {"watch/loss": 0.25})
    run_id = (run / "wandb_id.txt").read_text()
    (written,) = (run / "watch" / "wandb").glob(f"offline-run-*/run-{run_id}.wandb")
    end = time.monotonic() + PATIENCE_SECONDS  # W&B's own process writes it a moment after the run is finished
    while b"watch/loss" not in (content := written.read_bytes()) and time.monotonic() < end:
        time.sleep(0.02)
    assert b"watch/step" in content
    assert b"watch/loss" in content
    assert b"train/loss" not in content
    assert b"train/loss" not in content


def test_weights_and_biases_is_not_imported_unless_asked_for(tmp_path):
    program = """
        import sys
        from pathlib import Path
        from longtake.track.trackers import TrackedRun, Trackers; from longtake.track.config import TrackingConfig
        Trackers(TrackedRun(Path(sys.argv[1]), TrackingConfig(tensorboard=False))).close()
        assert "wandb" not in sys.modules
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": ROOT}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize("enabled", [True, False])
def test_a_missing_weights_and_biases_is_told_on_every_rank(enabled, tmp_path, monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    assert importlib.util.find_spec("wandb") is None
    with pytest.raises(UserError, match=r"wandb = True: .* pip install '\.\[wandb\]'"):
        opened(tmp_path, wandb=True, enabled=enabled)


def test_a_line_is_one_json_object_that_strict_readers_take(tmp_path):
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    with plain(tmp_path) as trackers:
        trackers.log_line({"step": 1, "text": "two\nlines", "x": float("nan")})
    (line,) = (tmp_path / METRICS_FILE).read_text().splitlines()
    assert json.loads(line, parse_constant=refuse)["text"] == "two\nlines"


def test_another_tracker_is_one_entry_and_gets_all_that_the_others_get(tmp_path, monkeypatch):
    got = []

    class Mine(module.Tracker):
        @classmethod
        def wanted(cls, config):
            return True

        def __init__(self, run):
            got.append(("opened", run.folder, run.resume_step))

        def log(self, step, values):
            got.append((step, values))

        def log_line(self, record):
            got.append(record)

        def close(self):
            got.append("closed")

    monkeypatch.setattr(module, "KINDS", (*module.KINDS, Mine))
    with plain(tmp_path, resume_step=2) as trackers:
        trackers.log(3, {"loss": 1.0})
        trackers.log_line({"step": 3})
    assert got == [("opened", tmp_path, 2), (3, {"loss": 1.0}), {"step": 3}, "closed"]
