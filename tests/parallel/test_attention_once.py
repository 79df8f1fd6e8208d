"""Selective blocks of every family run attention once, and full ones twice; gradients are the same."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from longtake.contracts import Conditions
from longtake.models import attention_kernels
from longtake.models.build import build_denoiser, example_conditions
from longtake.parallel.compile import BlockCompiler
from longtake.parallel.recomputation import Level, saved_as
from tests.parallel.blocks import set_blocks
from tests.plan.test_blocks import FAMILIES
from tests.precision import within


class Attentions(TorchDispatchMode):
    """Counts operations whose output selective blocks save as that of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.ran = Counter[str]()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran[operation.name()] += saved_as(operation, args) == "attention"
        return operation(*args, **(kwargs or {}))


def built(
    family: str, level: Level, dtype: torch.dtype, attention: str, compiler: BlockCompiler | None = None
) -> nn.Module:
    torch.manual_seed(0)
    model = build_denoiser(FAMILIES[family].model_copy(update={"attention": attention}))
    for p in model.parameters():
        nn.init.normal_(p, std=0.2)
    set_blocks(model, level, compiler=compiler)
    return model.to(dtype)


def gradients(model: nn.Module, family: str, dtype: torch.dtype) -> dict[str, Tensor]:
    config = FAMILIES[family]
    latent = (config.latent_channels, 13, 4, 4)
    conditions = example_conditions(config, latent, 6, 2)
    if "size" in conditions:
        conditions["size"].fill_(64.0)
    conditions = tree_map_only(Tensor, lambda one: one.to(dtype) if one.is_floating_point() else one, dict(conditions))
    x = torch.randn(2, *latent, generator=torch.Generator().manual_seed(1)).to(dtype)
    model(x, torch.full((2,), 0.5), Conditions(**conditions)).float().square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def attentions_run(family: str, dtype: torch.dtype = torch.float32, attention: str = "sdpa") -> list[Counter[str]]:
    """Operators that ran in a forward and a backward at each level. Gradients are compared."""
    found, ran = [], []
    for level in ("none", "selective", "full"):
        with Attentions() as attentions:
            found.append(gradients(built(family, level, dtype, attention), family, dtype))
        ran.append(+attentions.ran)
    for again in found[1:]:
        assert again.keys() == found[0].keys()
        assert all(torch.equal(again[name], grad) for name, grad in found[0].items())
    return ran


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_attention_runs_once_and_gradients_are_the_same(family: str, dtype: torch.dtype) -> None:
    without, selective, full = attentions_run(family, dtype)
    assert without.total() > 0
    assert selective == without
    assert full == without + without


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_blocks_run_it_once_too(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def attend(*args: Any) -> Any:
        ran.append(args[-1])
        return attention_kernels.attend(*args)

    monkeypatch.setattr("longtake.models.attention_op.attend", attend)
    compiler = BlockCompiler(dynamic=False, backend="aot_eager")
    model = built(family, "selective", torch.float32, "sdpa", compiler)
    found = gradients(model, family, torch.float32)
    of_compiled = len(ran)
    wanted = gradients(built(family, "none", torch.float32, "sdpa"), family, torch.float32)
    assert of_compiled == len(ran) - of_compiled > 0
    largest = max(float(grad.abs().max()) for grad in wanted.values())
    assert within(max(float((found[name] - grad).abs().max()) for name, grad in wanted.items()), 1e-5 * largest)
