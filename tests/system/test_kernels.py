"""A system's attention kernel and compilation: taken from the config, told before the first step."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd

from longtake.contracts import UserError
from longtake.parallel.compile import BlockCompiler
from longtake.parallel.mesh import Mesh
from longtake.parallel.recomputation import Level
from longtake.parallel.world import World, start_world
from longtake.system.build import build_system
from longtake.system.config import SystemConfig
from tests.precision import within
from tests.system.test_build import MODEL, system_config

LEVELS: tuple[Level, ...] = ("full", "selective", ("linear2",), ("linear2", "q_proj"))


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
    monkeypatch.setattr(BlockCompiler, "prepare", lambda self, *of: compiled.append((self.dynamic, self.limit)))
    monkeypatch.setattr(BlockCompiler, "compile", lambda self, forward, *of: forward)
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "elsewhere")
    config = system_config(compile=True, compile_limit=3, compile_cache=str(tmp_path / "kept"))
    system = build_system(config, Mesh.create(config.parallel, world), world)
    assert compiled == [(True, 3)]
    assert system.kernels[1] == f"compiled: blocks, one graph for all shapes, kept in {tmp_path / 'kept'}"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "kept")


def test_a_run_that_is_to_repeat_itself_tunes_no_code_by_time_and_has_no_cudnn_attention(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CUBLAS_WORKSPACE_CONFIG", "TORCHINDUCTOR_DETERMINISTIC"):
        monkeypatch.setenv(name, "")  # so that both are as before afterwards
        monkeypatch.delenv(name)
    config = system_config(deterministic=True)
    with torch._inductor.config.patch(deterministic=False), _switches_restored():
        torch.backends.cuda.enable_cudnn_sdp(True)
        build_system(config, Mesh.create(config.parallel, world), world)
        assert torch._inductor.config.deterministic
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert (os.environ["CUBLAS_WORKSPACE_CONFIG"], os.environ["TORCHINDUCTOR_DETERMINISTIC"]) == (":4096:8", "1")


@contextmanager
def _switches_restored() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cuda.cudnn_sdp_enabled()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cuda.enable_cudnn_sdp(before[1])


class CountingBackend:
    """Runs graphs as they are, and counts the matrix products of those for backward."""

    def __init__(self) -> None:
        self.products = 0
        self.backend = aot_autograd(
            fw_compiler=self._forward, bw_compiler=self._backward, partition_fn=min_cut_rematerialization_partition
        )

    def _forward(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        return make_boxed_func(graph.forward)

    def _backward(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        self.products += sum(name.startswith(("aten.mm.", "aten.addmm.")) for name in names)
        return make_boxed_func(graph.forward)


def gradients(config: SystemConfig, world: World) -> dict[str, torch.Tensor]:
    """Of the system of a config, for a loss on two samples."""
    system = build_system(config, Mesh.create(config.parallel, world), world)
    latents = torch.randn(2, MODEL["in_channels"], 2, 2, 3, generator=torch.Generator().manual_seed(0))
    system.denoiser(latents, torch.tensor([0.2, 0.7]), system.embed(["one", "two"])).square().mean().backward()
    return {name: p.grad for name, p in system.denoiser.named_parameters()}


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.slow
@pytest.mark.parametrize("precision", [None, "fp8"])
@pytest.mark.parametrize(
    "levels", [LEVELS[1::2], pytest.param(LEVELS, marks=pytest.mark.weekly)], ids=["some levels", "all levels"]
)
def test_compiled_blocks_save_the_layers_that_are_named(
    levels: Sequence[Level], precision: str | None, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    products = {}
    for level in levels:
        counting = CountingBackend()
        monkeypatch.setattr("longtake.system.build.BlockCompiler", partial(BlockCompiler, backend=counting.backend))
        torch._dynamo.reset()
        model = {**MODEL, "attention": "sdpa", "recompute": level}
        configs = (system_config(model=model, compile=how, precision=precision) for how in (False, True))
        eager, compiled = (gradients(config, world) for config in configs)
        largest = max(float(grad.abs().max()) for grad in eager.values())
        assert within(max(float((compiled[name] - grad).abs().max()) for name, grad in eager.items()), 1e-5 * largest)
        products[level] = counting.products
    products.pop("full", None)
    counts = list(products.values())
    assert counts == sorted(set(counts), reverse=True)


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_system_computes_what_an_eager_one_does(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longtake.system.build.BlockCompiler", partial(BlockCompiler, backend="eager"))
    found = []
    for compiled in (False, True):
        config = system_config(compile=compiled)
        system = build_system(config, Mesh.create(config.parallel, world), world)
        generator = torch.Generator().manual_seed(0)
        latents = torch.randn(2, MODEL["in_channels"], 2, 2, 3, generator=generator)
        found.append(system.denoiser(latents, torch.tensor([0.2, 0.7]), system.embed(["one", "two"])))
    assert torch.equal(*found)
