"""Tensor parallelism from a model's `tensor_plan`: ranks split the attention heads and the width of the MLPs.

In a region, from a `column` layer to the next `row` layer, every peer has all tokens of its sequence share and its own
heads or features; elsewhere each has its own tokens (sequence-parallel norms, Korthikanti et al. 2022): an all-gather
on the way in, a reduce-scatter on the way out. A norm over the whole width inside a region (`tensor_norms`) sums its
squares over the ranks.

Weights are not stored by rows: every parameter is sharded over all peers by FSDP, gathered whole before its block runs,
and a peer computes with its rows or columns of it. Memory at rest is the same, checkpoints do not depend on the degree,
and fused layers need no layout of their own. Peers' gradients, zero outside their rows, are summed by FSDP's reduction.
The price is memory and bandwidth within the node for whole gathered blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longtake.contracts import UserError
from longtake.models.lora import FrozenLinear, LoraLinear
from longtake.models.plans import TensorSplit
from longtake.parallel.exchange import gather_tokens, scatter_tokens, sum_of_all
from longtake.parallel.sequence import matching
from longtake.parallel.tokens import TokenCut

Range = tuple[int, int]  # start, size


def cut_layers(model: nn.Module, cut: TokenCut) -> None:
    """Apply `model.tensor_plan`. Raises `UserError` where a part of a layer does not divide by the degree."""
    peers, config = cut.peers, model.config
    for name, tokens in model.sequence_plan.entry.items():
        if name not in dict(model.named_modules()):
            raise UserError(
                f"parallel.tensor = {peers.tensor}: needs a model with the block {name}; add blocks or choose 1"
            )
        model.get_submodule(name).register_forward_pre_hook(partial(_cut_arguments, cut, tokens))
    entries: dict[tuple[nn.Module, tuple[str, ...]], _RegionInput] = {}
    for pattern, split in model.tensor_plan.items():
        if split.kind == "whole":
            continue
        for name, layer in matching(model, pattern):
            assert isinstance(layer, nn.Linear), f"{name} is a {type(layer).__name__}"
            if isinstance(layer, FrozenLinear) and layer.kind is not None:
                raise UserError(
                    f'lora.base = "{layer.kind}": quantised weights are not cut over tensor peers; choose "dense", or '
                    "parallel.tensor = 1 (parallel.sequence shares the tokens as well)"
                )
            whole = layer.out_features if split.kind == "column" else layer.in_features
            sizes = [getattr(config, part) for part in split.parts] or [whole]
            ranges = _own_ranges(name, sizes, peers.tensor, peers.tensor_index)
            if split.kind == "column":
                parent = model.get_submodule(name.rpartition(".")[0])
                entry = entries.setdefault((parent, split.tokens), _RegionInput(cut, split))
                entry.readers += 1
                layer.region, forward = entry, _column
            else:
                layer.region, forward = _RegionOutput(cut, split), _row
            layer.own_ranges = ranges
            # a method, not a `partial`: the compiler knows those by their identity, and would compile every block anew
            layer.forward = MethodType(forward, layer)
    for pattern in getattr(model, "tensor_norms", ()):
        for name, norm in matching(model, pattern):
            assert isinstance(norm, nn.RMSNorm), f"{name} is a {type(norm).__name__}"
            norm.own_ranges = _own_ranges(name, norm.normalized_shape, peers.tensor, peers.tensor_index)
            norm.cut, norm.forward = cut, MethodType(_norm, norm)


def _own_ranges(name: str, sizes: Sequence[int], num: int, index: int) -> tuple[Range, ...]:
    """Return a peer's range in each part of a dim that is a concatenation of parts of these sizes."""
    ranges, start = [], 0
    for size in sizes:
        if size % num:
            raise UserError(
                f"parallel.tensor = {num}: the {size} features of {name} do not divide by it; choose a divisor "
                f"of {size}"
            )
        ranges.append((start + index * size // num, size // num))
        start += size
    return tuple(ranges)


class _RegionInput:
    """A region's input: the tokens of all ranks, gathered once for all parallel layers that read them."""

    def __init__(self, cut: TokenCut, split: TensorSplit) -> None:
        self.cut, self.split = cut, split
        self.readers = 0  # layers that read the same input
        self._input: Tensor | None = None
        self._gathered: Tensor | None = None
        self._left = 0  # of them that have yet to read it

    def read(self, x: Tensor) -> Tensor:
        """Return the tokens of all peers that belong to this peer's x; x itself where every peer has it whole."""
        if not self.split.tokens:
            return x
        if self._input is not x:
            peers = self.cut.peers
            self._input, self._left = x, self.readers
            self._gathered = gather_tokens(x, self.cut.tensor_sizes(self.split.tokens), peers.tensor_group)
        self._left -= 1
        gathered = self._gathered
        if not self._left:
            self._input = self._gathered = None  # nothing is held longer than it is read
        return gathered


@dataclass(frozen=True)
class _RegionOutput:
    """A region's output: the sum of all ranks' parts, of which each gets its own tokens."""

    cut: TokenCut
    split: TensorSplit

    def leave(self, partial_sums: Tensor) -> Tensor:
        return scatter_tokens(partial_sums, self.cut.tensor_sizes(self.split.tokens), self.cut.peers.tensor_group)


def _column(layer: nn.Linear, x: Tensor) -> Tensor:
    """Own tokens [B, l, D] -> own features of the tokens of all peers [B, L, D_out / peers].

    An adapter's B is cut like the weight; every peer computes A x of all tokens, whose gradient is again a part of a
    sum.
    """
    ranges, x = layer.own_ranges, layer.region.read(x)
    if not isinstance(layer, LoraLinear):
        return _PartOfLinear.apply(x, layer.weight, layer.bias, 0, ranges)
    delta = _PartOfLinear.apply(layer.scaled(F.linear(x, layer.lora_a)), layer.lora_b, None, 0, ranges)
    if layer.magnitude is None:
        return _PartOfLinear.apply(x, layer.weight, layer.bias, 0, ranges) + delta
    base = _PartOfLinear.apply(x, layer.weight, None, 0, ranges)
    out = layer.joined(base, delta, _take(layer.row_factors(), 0, ranges))
    return out if layer.bias is None else out + _take(layer.bias, 0, ranges)


def _row(layer: nn.Linear, x: Tensor) -> Tensor:
    """Own features of the tokens of all peers [B, L, D_in / peers] -> own tokens [B, l, D].

    An adapter's A is cut like the weight; what B makes of a part of A x is a part of the sum as well.
    """
    ranges = layer.own_ranges
    out = _PartOfLinear.apply(x, layer.weight, None, 1, ranges)
    if isinstance(layer, LoraLinear):
        low = layer.scaled(_PartOfLinear.apply(x, layer.lora_a, None, 1, ranges))
        delta = F.linear(low, layer.lora_b)
        out = out + delta if layer.magnitude is None else layer.joined(out, delta, layer.row_factors())
    out = layer.region.leave(out)
    return out if layer.bias is None else out + layer.bias


def _norm(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    """Own features of all [B, L, D / peers], normed over the whole width: squares are summed over the ranks."""
    floats = x.to(torch.promote_types(x.dtype, torch.float32))
    squares = sum_of_all(floats.square().sum(-1, keepdim=True), norm.cut.peers.tensor_group, norm.cut.is_compiled)
    (width,) = norm.normalized_shape
    normed = floats * torch.rsqrt(squares / width + norm.eps)
    return (normed * _take(norm.weight, 0, norm.own_ranges)).to(x.dtype)


def _cut_arguments(cut: TokenCut, names: tuple[str, ...], module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the first arguments of a module, tokens [B, L, D], cut to this peer's part."""
    own = [x.narrow(1, *cut.tensor_share(name)).clone() for name, x in zip(names, args, strict=False)]
    return *own, *args[len(own) :]


class _PartOfLinear(torch.autograd.Function):
    """x W^T + b with ranges of W's rows and b (dim 0), or of W's columns (dim 1); gradients are whole, zero elsewhere.

    The whole weight is saved for backward, as in an ordinary linear layer, since FSDP frees it in between but would not
    free a copy of some rows.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dim: int, ranges: tuple[Range, ...]
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.dim, ctx.ranges = dim, ranges
        return F.linear(x, _take(weight, dim, ranges), None if bias is None else _take(bias, 0, ranges))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows, inputs = grad.flatten(0, -2), x.flatten(0, -2)
        dx = grad @ _take(weight, ctx.dim, ctx.ranges) if ctx.needs_input_grad[0] else None
        dw = weight.new_zeros(weight.shape) if ctx.needs_input_grad[1] else None
        db = grad.new_zeros(weight.shape[0]) if ctx.needs_input_grad[2] else None
        offset = 0
        for start, size in ctx.ranges:
            if dw is not None and ctx.dim == 0:
                dw[start : start + size] = rows[:, offset : offset + size].T @ inputs
            elif dw is not None:
                dw[:, start : start + size] = rows.T @ inputs[:, offset : offset + size]
            if db is not None:
                db[start : start + size] = rows[:, offset : offset + size].sum(0)
            offset += size
        return dx, dw, db, None, None


def _take(weight: Tensor, dim: int, ranges: tuple[Range, ...]) -> Tensor:
    parts = [weight.narrow(dim, start, size) for start, size in ranges]
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]
