"""`precision = "fp8"`: which products it takes, what it leaves as it is, and where it cannot be."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longtake.contracts import UserError
from longtake.models.config import MMDiTConfig
from longtake.parallel.mesh import Mesh
from longtake.parallel.world import World, start_world
from longtake.plan.blocks import count_blocks
from longtake.plan.layout import Layout, MicroBatch
from longtake.plan.memory import forecast_memory
from longtake.system.build import System, build_system
from longtake.system.config import SystemConfig
from longtake.system.float8 import check_float8, use_float8
from tests.system.test_build import MODEL, system_config
from tests.train.runs import tensors, train_here

pytest.importorskip("torchao.float8")
FITTING = ("--model.hidden_size", "32", "--model.axes_dim", "(4, 6, 6)")  # both sizes of a weight divide by 16


def built(world: World, **keys: Any) -> System:
    config: SystemConfig = system_config(model={**MODEL, "attention": "sdpa", **keys.pop("model", {})}, **keys)
    return build_system(config, Mesh.create(config.parallel, world), world)


def gradients(system: System) -> dict[str, Tensor]:
    """For a loss on two samples of 9 tokens: no multiple of 16, as the kernels want the inner dim."""
    latents = torch.randn(2, MODEL["in_channels"], 1, 3, 3, generator=torch.Generator().manual_seed(0))
    system.denoiser(latents, torch.tensor([0.2, 0.7]), system.embed(["one", "two"])).square().mean().backward()
    return {name: p.grad.to_local() for name, p in system.denoiser.named_parameters()}


def test_the_blocks_layers_over_tokens_multiply_in_float8_and_parameters_stay() -> None:
    with start_world("cpu") as world:
        plain, float8 = built(world), built(world, precision="fp8")
        layers = {type(layer).__name__: name for name, layer in float8.denoiser.named_modules() if "lin" in name}
        assert layers == {"Float8Linear": "single_blocks.0.linear2", "Linear": "final_layer.linear"}
        assert type(float8.denoiser.single_blocks[0].modulation.lin) is torch.nn.Linear
        assert float8.kernels[1] == (
            "float8: products of 16 linear layers, emulated, for a CPU has none: slower than bf16"
        )
        wanted, found = gradients(plain), gradients(float8)
    assert {name: (p.dtype, p.shape) for name, p in found.items()} == {n: (p.dtype, p.shape) for n, p in wanted.items()}
    error = [float((found[name] - of).norm() / of.norm()) for name, of in wanted.items()]
    assert 0.001 < max(error) < 0.2


@pytest.mark.parametrize("level", ["full", "selective", ["linear2"]])
def test_a_level_changes_no_gradient_of_float8_blocks(level: str | list[str]) -> None:
    with start_world("cpu") as world:
        wanted = gradients(built(world, precision="fp8"))
        again = {"recompute": level}
        found = gradients(built(world, precision="fp8", model=again))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("remat", [(), (19, 38)], ids=["all saved", "recomputed"])
def test_float8_is_foretold_to_hold_3_percent_more_at_most(remat: tuple[int, ...]) -> None:
    config, batch = MMDiTConfig(attention="sdpa"), MicroBatch(3, (16, 9, 26, 40), 512)
    bf16, float8 = (Layout(shard=8, remat=remat, level="selective", compiled=True, float8=of) for of in (False, True))
    more = forecast_memory(config, batch, float8).total / forecast_memory(config, batch, bf16).total
    assert 0.9 < more <= 1.03
    kept = [count_blocks(config, batch, layout).blocks[0].products for layout in (bf16, float8)]
    assert kept[0].keys() == kept[1].keys()
    for key in kept[0]:
        assert kept[1][key] == pytest.approx(kept[0][key], rel=1e-6)  # `_scaled_mm` counts as `mm` does


def test_a_checkpoint_goes_between_precisions(config: Path) -> None:
    steps = ("--ckpt_every", "0", "--num_workers", "0", *FITTING)
    first, _ = train_here(config, "--max_steps", "2", *steps)
    onward = ("--max_steps", "4", "--load", str(first.checkpoint), *steps)
    runs = {
        name: train_here(config, *onward, "--exp_name", name, "--precision", precision)
        for name, precision in (("on_in_bf16", "None"), ("on_in_fp8", "fp8"))
    }
    assert "float8: products of" in runs["on_in_fp8"][1]
    plain, float8 = (tensors(outcome.checkpoint) for outcome, _ in runs.values())
    assert {name: (of.dtype, of.shape) for name, of in plain.items()} == {
        name: (of.dtype, of.shape) for name, of in float8.items()
    }
    weight = "model.single_blocks.0.linear2.weight"
    assert not torch.equal(plain[weight], float8[weight])
    back, _ = train_here(config, "--max_steps", "5", "--load", str(runs["on_in_fp8"][0].checkpoint), *steps)
    assert back.clock.global_step == 5


def test_what_float8_cannot_be_with_is_refused_with_what_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"parallel.tensor = 2; write parallel.tensor = 1 or precision = None"):
        check_float8("fp8", 2)
    with pytest.raises(UserError, match=r'precision = "fp8": adapters .*; leave precision or lora out'):
        system_config(precision="fp8", lora={"rank": 2})
    with pytest.raises(UserError, match=r'precision = "fp8": blocks that are not compiled .*; write compile = True'):
        check_float8("fp8", 1, eager=True)
    with pytest.raises(UserError, match=r"; here no C\+\+ compiler was found; install g\+\+, or write"):
        check_float8("fp8", 1, eager=True, missing="no C++ compiler was found; install g++")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(UserError, match=r"capability 8.9 or higher, this one has 8.6; write precision = None"):
        use_float8(torch.nn.Module(), torch.device("cuda"))
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(UserError, match=r"pip install '\.\[fp8\]'"):
        use_float8(torch.nn.Module(), torch.device("cpu"))
