"""Activations, written straight into what a product reads."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longtake.models.rotations import for_compiler


def beside_gelu(x: Tensor, hidden: Tensor) -> Tensor:
    """[x | GELU(hidden)], tanh form: x [B, S, D], hidden [B, S, H], of one dtype -> [B, S, D + H].

    Only x is copied: activations are written beside it, for the compiler, which fuses that itself, as an expression.
    """
    if for_compiler((x, hidden)):
        return torch.cat([x, F.gelu(hidden, approximate="tanh")], -1)
    return _BesideGelu.apply(x, hidden)


class _BesideGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, hidden: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        out = x.new_empty(*x.shape[:-1], x.shape[-1] + hidden.shape[-1])
        out[..., : x.shape[-1]] = x
        torch.ops.aten.gelu.out(hidden, approximate="tanh", out=out[..., x.shape[-1] :])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (hidden,) = ctx.saved_tensors
        of_x, of_hidden = grad.split([grad.shape[-1] - hidden.shape[-1], hidden.shape[-1]], -1)
        return of_x, torch.ops.aten.gelu_backward(of_hidden, hidden, approximate="tanh")
