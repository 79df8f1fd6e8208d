"""No tensor is on the wrong device and no training step waits for the device: whole runs on a fake CUDA device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.pretended.library import CannotBuild, build_library
from tests.pretended.plays import MADE, TRAINED

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
