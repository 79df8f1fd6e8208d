"""A host is lost in the middle of a training: the launch says so and goes on without it, on two SSH servers."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.cluster.servers import Site, programs, start_launch, words_of
from tests.train.runs import finish, steps_saved, wait_until, write_config


@pytest.mark.slow
def test_a_launch_that_loses_a_host_goes_on_without_it_in_the_same_folder(place: Site, tmp_path: Path, clips: Path):
    config = write_config(tmp_path, clips, max_steps=60, ckpt_every=5, slots_per_step=2)
    launched = start_launch(
        place, "train", config, "--exp-name", "loses a host", folder=tmp_path, options=("--restarts", 1)
    )
    run = tmp_path / "outputs" / "loses a host"
    wait_until(launched, lambda: bool(steps_saved(run)))
    (connection,) = [number for number in programs(place, "ssh") if b"beta" in words_of(number)]
    os.kill(connection, signal.SIGKILL)
    code, out, error = finish(launched)
    assert code == 0, error
    assert "diagnosis: a node is away, on beta (the connection was lost)" in error
    assert "starts again (1 of 1), without beta" in error
    assert "[alpha] done at step 60" in out
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines if "loss" in line] == list(range(1, 61))
    assert [path.name for path in run.parent.iterdir()] == ["loses a host"]
