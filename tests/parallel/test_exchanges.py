"""Every kind of exchange that a plan may name gives the results and gradients of one process."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longtake.models.attention import Attention
from longtake.models.plans import Exchange, Halo, SequencePlan, Sum, Switch
from longtake.parallel.config import ParallelConfig
from longtake.parallel.mesh import Mesh
from longtake.parallel.shard import cut_among
from longtake.parallel.tokens import TokenCut
from longtake.parallel.world import World
from tests.precision import within
from tests.ranks import Facts, on_ranks

WIDTH, PLACES, SEGMENT, CAPTION = 8, 3, 2, 2  # tokens of a frame, frames of a segment, tokens of its caption
SPLIT = {"x_in": 1, "text_in": 1}


class OverTime(nn.Module):
    """Attention over the frames at each place."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = [x.movedim(1, 3) for x in (q, k, v)]  # [B, S, N, F, K]
        return F.scaled_dot_product_attention(*heads).movedim(3, 1)


class Windows(nn.Module):
    """Attention of segments to themselves, the last frame of the one before and their caption; what visits sum to."""

    def forward(self, x: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        sums, captions = torch.zeros_like(x), text.unflatten(1, (text.shape[1] // CAPTION, CAPTION)).unbind(1)
        for i, caption in enumerate(captions):
            start, size = i * SEGMENT * PLACES, (SEGMENT + 1) * PLACES
            own = torch.cat([x.narrow(1, start, size), caption], 1)
            found = F.scaled_dot_product_attention(own, own, own)[:, :size]
            sums = sums + F.pad(found, (0, 0, start, x.shape[1] - start - size))
        return sums, text


class Outer(nn.Module):
    """A gradient of inner weights: the sum over tokens of k v'."""

    def forward(self, k: Tensor, v: Tensor) -> Tensor:
        return k.transpose(1, 2) @ v


class Inner(nn.Module):
    """A weight for each head, which all tokens move at rates of their own, as in test-time training."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, WIDTH // 2, WIDTH // 2))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rate: Tensor) -> Tensor:
        moved = self.weight + torch.einsum("blnk,blnj->bnkj", k * rate, v)
        return torch.einsum("blnk,bnkj->blnj", q, moved)


KINDS: dict[str, tuple[SequencePlan, type[nn.Module]]] = {
    "keys": (
        SequencePlan(SPLIT, {"x_out": "x_in"}, {"mix": Exchange(("x_in",), ("text_in",))}),
        partial(Attention, "auto"),  # type: ignore[dict-item]
    ),
    "switch": (SequencePlan(SPLIT, {"x_out": "x_in"}, {"mix": Switch("x_in")}, units={"x_in": "frame"}), OverTime),
    "halo": (
        SequencePlan(
            SPLIT,
            {"x_out": "x_in"},
            {"mix": Halo("x_in", "frame")},
            units={"x_in": "segment", "text_in": "caption"},
        ),
        Windows,
    ),
    "inner": (
        SequencePlan(SPLIT, {"x_out": "x_in"}, {"mix": Exchange(("x_in",), ring=False, of_heads=("weight",))}),
        Inner,
    ),
    "sum": (SequencePlan(SPLIT, {"x_out": "x_in"}, {"mix": Sum()}), Outer),
}


class Toy(nn.Module):
    """Tokens of video and text, one submodule in which they meet, and a gathered output."""

    def __init__(self, kind: str, heads: int) -> None:
        super().__init__()
        self.kind, self.heads, self.config = kind, heads, SimpleNamespace()
        self.sequence_plan, mix = KINDS[kind]
        self.x_in, self.text_in, self.x_out = (nn.Linear(WIDTH, n * WIDTH) for n in (3, 2, 1))
        self.mix = mix()

    units = staticmethod(
        lambda config, latent, text_tokens: {"frame": PLACES, "segment": SEGMENT * PLACES, "caption": CAPTION},
    )

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        """x [B, F, S, D], text [B, L, D] -> [B, F * S, D]."""
        q, k, v = self.x_in(x.flatten(1, 2)).chunk(3, -1)
        heads = [one.unflatten(-1, (self.heads, -1)) for one in (q, k, v)]
        if self.kind == "keys":
            keys = [one.unflatten(-1, (self.heads, -1)) for one in self.text_in(text).chunk(2, -1)]
            return self.x_out(self.mix(heads[0], *keys).flatten(2))
        if self.kind == "inner":
            return self.x_out(self.mix(*heads, heads[2][..., :1].sigmoid()).flatten(2))
        if self.kind == "switch":
            grids = [one.unflatten(1, (-1, PLACES)) for one in heads]
            return self.x_out(self.mix(*grids).flatten(1, 2).flatten(2))
        if self.kind == "halo":
            return self.x_out(self.mix(q, self.text_in(text)[..., :WIDTH])[0])
        return self.x_out(q @ self.mix(k, v))


def outcome(frames: int, kind: str, heads: int, mesh: Mesh | None = None, compiled: bool = False) -> dict[str, Tensor]:
    """The output and the gradients of inputs and parameters, whole; compiled: by the operators of compiled code."""
    torch.manual_seed(1)
    model = Toy(kind, heads)
    inputs = torch.randn(2, frames, PLACES, WIDTH), torch.randn(2, max(1, frames // SEGMENT) * CAPTION, WIDTH)
    target = torch.randn(2, frames * PLACES, WIDTH)
    if mesh is not None:
        cut_among(model, mesh.token_peers(heads))
    with pytest.MonkeyPatch.context() as patch:
        if compiled:
            importlib.import_module("torch._dynamo")  # from then on lengths are found for compiled code
            patch.setattr(TokenCut, "is_compiled", True)
        out = model(*(x.requires_grad_() for x in inputs))
        (out * target).sum().backward()
    leaves = {**dict(model.named_parameters()), "x": inputs[0], "text": inputs[1]}
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in leaves.items()}
    for gradient in found.values() if mesh is not None else ():
        torch.distributed.all_reduce(gradient)
        gradient /= mesh.sequence
    return {"out": out.detach()} | found


LENGTHS = {"keys": (1, 3), "switch": (1, 2, 5), "halo": (3, 5, 7), "inner": (1, 3), "sum": (1, 3)}  # frames
CASES = {
    f"{kind} {frames} {heads}": (frames, kind, heads)
    for kind, lengths in LENGTHS.items()
    for frames in lengths
    for heads in ((1, 2) if kind == "keys" else (2,))
}


def farthest(world: World) -> Facts:
    mesh = Mesh.create(ParallelConfig(sequence=world.size), world)
    return {
        name: [compared(outcome(*case), outcome(*case, mesh, compiled)) for compiled in (False, True)[: 1 + full]]
        for name, case in CASES.items()
        for full in [case[0] == max(LENGTHS[case[1]])]  # no share is empty, with which nothing is compiled
    }


def compared(alone: Mapping[str, Tensor], together: Mapping[str, Tensor]) -> dict[str, float]:
    assert alone["x"].abs().max() > 0.01
    return {name: float((value - together[name]).abs().max()) for name, value in alone.items()}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return [facts["apart"] for facts in on_ranks(2, Path(tmp_path_factory.mktemp("exchanges")), {"apart": farthest})]


@pytest.mark.parametrize("case", CASES)
def test_two_peers_compute_what_one_process_does(found: list[Any], case: str) -> None:
    for of_rank in found:
        for farthest in of_rank[case]:
            assert within(max(farthest.values()), 2e-5), farthest
