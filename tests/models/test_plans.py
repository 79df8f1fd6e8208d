"""The cuts a model declares: they name what exists, and shares cut that way add up to the whole."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn

from longtake.models.config import MMDiTConfig
from longtake.models.mmdit import MMDiT
from longtake.models.plans import TensorSplit
from tests.models.golden import tiny_config
from tests.models.initialised import initialise


def patterns(model: MMDiT) -> set[str]:
    return {re.sub(r"_blocks\.\d+\.", "_blocks.*.", name) for name, _ in model.named_modules()}


@pytest.mark.parametrize("fused", [False, True])
def test_plans_name_modules_that_exist_with_their_sizes(fused: bool) -> None:
    config = tiny_config(fused_qkv=fused, cond_embed=True)
    model = MMDiT(config)
    assert {*MMDiT.sequence_plan.split, *MMDiT.sequence_plan.gather, *MMDiT.sequence_plan.exchanges} <= patterns(model)
    assert all(isinstance(getattr(model, name), nn.ModuleList) for name in MMDiT.blocks)
    other = {"q_proj", "k_proj", "v_proj", "v_mlp"} if fused else {"qkv", "linear1"}
    planned = {name for name in MMDiT.tensor_plan if name.rpartition(".")[2] not in other}
    assert planned <= patterns(model)
    for name in planned:
        split, layer = MMDiT.tensor_plan[name], model.get_submodule(name.replace("*", "0"))
        if split.parts:
            cut = layer.out_features if split.kind == "column" else layer.in_features
            assert cut == sum(getattr(config, part) for part in split.parts)


def test_every_layer_and_argument_runs_over_tokens_that_are_cut() -> None:
    plan = MMDiT.sequence_plan
    named = [*plan.gather.values(), *(name for names in plan.entry.values() for name in names)]
    named += [name for exchange in plan.exchanges.values() for name in exchange.queries]
    named += [name for split in MMDiT.tensor_plan.values() for name in split.tokens]
    assert set(named) <= set(plan.split)
    assert all(split.tokens for split in MMDiT.tensor_plan.values())
    assert set(plan.entry) <= {name for name, _ in MMDiT(tiny_config()).named_modules()}


@pytest.mark.parametrize("fused", [False, True])
def test_shares_of_a_single_block_add_up_to_the_whole(fused: bool) -> None:
    config, block = initialised_block("single_blocks", fused)
    tokens, vec = torch.randn(2, 7, 32), torch.randn(2, 32)
    rope = torch.randn(2, 7, 1, 8)
    whole = block(tokens, vec, rope)
    shares = [cut_share(block, "single_blocks.*.", config, rank) for rank in range(2)]
    parts = [share(tokens, vec, rope) - tokens for share in shares]
    torch.testing.assert_close(tokens + parts[0] + parts[1], whole, atol=1e-5, rtol=0)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("stream", ["img", "txt"])
def test_shares_of_a_stream_hold_each_head_once_and_add_up_on_the_way_out(fused: bool, stream: str) -> None:
    config, block = initialised_block("double_blocks", fused)
    attention = getattr(block, f"{stream}_attn")
    x = torch.randn(2, 7, 32)
    whole = attention(x)
    shares = [cut_share(attention, f"double_blocks.*.{stream}_attn.", config, rank) for rank in range(2)]
    by_share = [share(x) for share in shares]
    for i, expected in enumerate(whole):
        torch.testing.assert_close(torch.cat([out[i] for out in by_share], dim=2), expected, atol=1e-6, rtol=0)
    out = sum(share.proj(qkv[2].flatten(2)) for share, qkv in zip(shares, by_share, strict=True))
    torch.testing.assert_close(out, attention.proj(whole[2].flatten(2)), atol=1e-5, rtol=0)


def initialised_block(kind: str, fused: bool) -> tuple[MMDiTConfig, nn.Module]:
    config = tiny_config(fused_qkv=fused)
    model = MMDiT(config)
    initialise(model, 0)
    return config, getattr(model, kind)[0]


@torch.no_grad()
def cut_share(module: nn.Module, prefix: str, config: MMDiTConfig, rank: int) -> nn.Module:
    """A copy with half of every planned layer; the bias of a row layer goes to rank 0."""
    share = copy.deepcopy(module)
    for name, layer in share.named_children():
        split: TensorSplit | None = MMDiT.tensor_plan.get(prefix + name)
        if split is None:
            continue
        dim = 0 if split.kind == "column" else 1
        sizes = [getattr(config, part) for part in split.parts] or [layer.weight.shape[dim]]
        layer.weight = nn.Parameter(torch.cat([p.chunk(2, dim)[rank] for p in layer.weight.split(sizes, dim)], dim))
        if split.kind == "column":
            layer.bias = nn.Parameter(torch.cat([p.chunk(2)[rank] for p in layer.bias.split(sizes)]))
        elif rank:
            layer.bias.zero_()
    return share
