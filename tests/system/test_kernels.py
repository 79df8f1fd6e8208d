"""A system's attention kernel and compilation: taken from the config, told before the first step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from longtake.config import ConfigError
from longtake.contracts import UserError
from longtake.parallel import BlockCompiler, Mesh, World, start_world
from longtake.system import build_system
from tests.system.test_build import MODEL, system_config


@pytest.fixture
def world() -> Iterator[World]:
    with start_world("cpu") as world:
        yield world


def test_the_kernel_of_attention_is_chosen_and_told(world: World) -> None:
    config = system_config(model={**MODEL, "attention": "flash"})
    system = build_system(config, Mesh.create(config.parallel, world), world)
    assert system.kernels == ("attention: PyTorch's fused CPU kernel (fp32, head width 16)",)
    assert system.denoiser.double_blocks[0].attention.backend == "flash"


def test_a_kernel_that_cannot_run_stops_the_run_before_it_begins(world: World) -> None:
    config = system_config(model={**MODEL, "attention": "cudnn"})
    with pytest.raises(UserError, match=r"model.attention = 'cudnn': needs a CUDA device"):
        build_system(config, Mesh.create(config.parallel, world), world)


def test_blocks_are_compiled_and_the_cache_is_told(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[tuple[bool, int]] = []
    monkeypatch.setattr(BlockCompiler, "compile", lambda self, model: compiled.append((self.dynamic, self.limit)))
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "elsewhere")
    config = system_config(compile=True, compile_limit=3, compile_cache=str(tmp_path / "kept"))
    system = build_system(config, Mesh.create(config.parallel, world), world)
    assert compiled == [(True, 3)]
    assert system.kernels[1] == f"compiled: blocks, one graph for all shapes, kept in {tmp_path / 'kept'}"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "kept")


def test_compilation_and_a_budget_of_kept_outputs_exclude_each_other() -> None:
    model = {**MODEL, "grad_ckpt_settings": (1, 1), "grad_ckpt_budget": 0.5}
    with pytest.raises(ConfigError, match=r"grad_ckpt_budget = 0.5: compiled blocks keep their inputs alone"):
        system_config(model=model, compile=True)


def test_a_compiled_system_computes_what_an_eager_one_does(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longtake.system.build.BlockCompiler", partial(BlockCompiler, backend="eager"))
    torch._dynamo.reset()
    found = []
    for compiled in (False, True):
        config = system_config(compile=compiled)
        system = build_system(config, Mesh.create(config.parallel, world), world)
        generator = torch.Generator().manual_seed(0)
        latents = torch.randn(2, MODEL["in_channels"], 2, 2, 3, generator=generator)
        found.append(system.denoiser(latents, torch.tensor([0.2, 0.7]), system.embed(["one", "two"])))
    assert torch.equal(*found)
    torch._dynamo.reset()
