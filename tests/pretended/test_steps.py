"""Host activity in training steps of every family, mode and learned encoder, on the fake CUDA device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.pretended.library import CannotBuild, build_library
from tests.pretended.steps import IN_FSDP, MODES, OFFLOADED, RELEASED, STEPS

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
RUNNING_AHEAD = [name for name in (*MODES, *RELEASED) if name != OFFLOADED]


@pytest.fixture(scope="module")
def modes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("steps")
    try:
        library = build_library(folder)
    except CannotBuild as error:
        pytest.skip(str(error))
    command = [sys.executable, str(Path(__file__).with_name("steps.py")), str(library), str(folder), str(ROOT)]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return json.loads((folder / "steps.json").read_text())


@pytest.mark.parametrize("name", RUNNING_AHEAD)
def test_no_step_waits_for_the_device_or_copies_from_pageable_memory(modes: dict[str, Any], name: str) -> None:
    run = modes[name]
    assert run["error"] is None, run["error"]
    assert len(run["steps"]) == STEPS
    for kind in ("waits", "pageable", "not_deterministic"):
        assert [step[kind] for step in run["steps"]] == [[]] * STEPS, kind


def test_masters_in_host_memory_wait_for_each_further_gradient_and_once_for_the_update(modes: dict[str, Any]) -> None:
    run = modes[OFFLOADED]
    assert run["error"] is None, run["error"]
    assert len(run["steps"]) == STEPS
    for step in run["steps"]:
        ours = [place for place in step["waits"] if place != IN_FSDP]
        assert [place.partition(" <")[0] for place in ours] == ["train/optimizer/update.py _near_masters"]
        # FSDP2 adds gradients up on the CPU: of each micro-batch but the first it waits for every one
        assert len(step["waits"]) - len(ours) == step["trained"] * (len(step["prepares"]) - 1) > 0


@pytest.mark.parametrize("name", RUNNING_AHEAD)
def test_inputs_are_launched_while_the_device_has_the_step_before_to_compute(modes: dict[str, Any], name: str) -> None:
    steps = modes[name]["steps"]
    for before, step in pairwise(steps):
        # the last launch that the host has waited for when all of the step's first inputs are launched
        over = max((last for at, last in (*before["reads"], *step["reads"]) if at <= step["forwards"][0]), default=0)
        assert over <= before["begins"]
        assert before["forwards"][0] < before["updates"] < step["prepares"][0] < step["forwards"][0]
