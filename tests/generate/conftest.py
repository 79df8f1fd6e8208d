from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from longtake.generate.config import GenerateConfig
from longtake.generate.run import generate, open_system
from longtake.generate.source import resolve_source
from longtake.parallel.shard import local_tensor
from longtake.parallel.world import World, start_world
from longtake.system.build import System
from longtake.train.run import Outcome
from tests.generate.runs import make_run


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A trained run; its folder lies in `outputs`, beside `tiny.py`, its config."""
    return make_run(tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with start_world("cpu") as world:
        yield world


@pytest.fixture(scope="module")
def system(run: Outcome, world: World) -> System:
    """The run's model with its weights moved far enough for every prompt to count."""
    system = open_system(resolve_source(str(run.folder), []), world, lambda text: None)
    torch.manual_seed(0)
    for parameter in system.denoiser.parameters():
        values = local_tensor(parameter).data
        values += 0.05 * torch.randn(values.shape)
    return system


@pytest.fixture
def make(system: System, run: Outcome, world: World, tmp_path: Path):
    """Generates with `key=value` overrides into the test's own folder; returns the videos."""

    def make(*overrides: str) -> list:
        flags = ["--save-dir", str(tmp_path / "made"), *overrides]
        config: GenerateConfig = resolve_source(str(run.folder), flags).config
        return generate(system, config, world, lambda text: None)

    return make
