"""No tensor is on the wrong device, no training step waits for the device, and what steps allocate is settled by their
buckets: whole runs on a pretended GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pretended.library import CannotBuild, build_library
from tests.pretended.plays import MADE, SETTLED, TRAINED

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
Found = dict[str, Any]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("pretended")
    try:
        library = build_library(folder)
    except CannotBuild as error:
        pytest.skip(str(error))
    command = [sys.executable, "-m", "tests.pretended.plays", str(library), str(folder)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, cwd=HERE.parents[1], env=variables)
    return json.loads((folder / "found.json").read_text())


def test_the_pretended_gpu_refuses_what_a_real_one_does(found: Found) -> None:
    said = found["mistakes"]
    assert "to numpy" in said.pop("numpy")
    assert "cannot pin" in said.pop("pinned")
    assert {name: "on the same device" in error for name, error in said.items()} == {
        "two devices": True,
        "a layer left behind": True,
        "in place": True,
    }
    assert found["waiting"] == 4


@pytest.mark.parametrize("name", TRAINED)
def test_a_run_of_training_has_every_tensor_where_it_belongs(found: Found, name: str) -> None:
    assert found[name]["error"] is None, found[name]["error"]


@pytest.mark.parametrize("name", [name for name in TRAINED if name != "masters in host memory"])
def test_no_step_of_training_waits_for_the_device(found: Found, name: str) -> None:
    assert found[name]["waits"] == []


@pytest.mark.parametrize("name", MADE)
def test_a_generation_has_every_tensor_where_it_belongs(found: Found, name: str) -> None:
    assert found[name]["error"] is None, found[name]["error"]


def steady(steps: list[list[int]]) -> bool:
    return len({tuple(sizes) for sizes in steps[SETTLED:]}) == 1


@pytest.mark.parametrize("name", ["eager", "recomputed"])
def test_steps_of_a_bucket_allocate_alike_from_the_third_on_and_leave_nothing(found: Found, name: str) -> None:
    own = found[f"allocated {name}"]
    long = {bucket: steps for bucket, steps in own["made"].items() if len(steps) > SETTLED + 1}
    assert len(long) >= 2
    assert min(len(sizes) for steps in long.values() for sizes in steps) > 100  # forward, backward and update
    assert [bucket for bucket, steps in long.items() if not steady(steps)] == []
    assert set(own["left"]) == {0}


def test_a_step_that_keeps_something_or_takes_more_each_time_is_found(found: Found) -> None:
    faulty = found["allocated with faults"]
    assert not any(steady(steps) for steps in faulty["made"].values() if len(steps) > SETTLED + 1)
    assert faulty["left"] == sorted(faulty["left"])
    assert faulty["left"][-1] >= 5 * 8 * torch.float32.itemsize


def test_recomputed_blocks_allocate_otherwise_than_eager_ones(found: Found) -> None:
    eager, again = (found[f"allocated {name}"]["made"] for name in ("eager", "recomputed"))
    assert all(len(again[bucket][-1]) > len(eager[bucket][-1]) for bucket in eager.keys() & again.keys())
