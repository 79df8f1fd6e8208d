"""Several linear layers of one input as one product, for compute alone: parameters, their names, gradients, optimizer
states, initial values and files stay those of each layer.

    [y1 | y2 | ...] = x [W1; W2; ...]^T + [b1 | b2 | ...]        dx = dy W, dW = dy^T x, db = sum dy over rows

where the gradients of W and b are then those of each layer, as views of one memory. The joined W is a view where the
weights lie one behind the other in memory, else a copy, which is made again in backward: it exists only while it is
multiplied, for sharded weights are let go of in between.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from longtake.models import fused
from longtake.models.attention_op import OPENED

JOINED = "longtake::project"  # the operator: x, weights, biases


def project(module: nn.Module, x: Tensor) -> list[Tensor]:
    """x [..., D] through each of the linear layers that `module.projections` names.

    By one product where `fused` says so and all are layers as they were made: with adapters, in float8, and cut for
    tensor peers each has a product of its own.
    """
    layers = [getattr(module, name) for name in module.projections]
    if not (fused.uses("project") and can_join(layers)):
        return [layer(x) for layer in layers]
    biases = [layer.bias for layer in layers if layer.bias is not None]
    out = _project(x, [layer.weight for layer in layers], biases)
    return list(out.split([layer.out_features for layer in layers], -1))


def can_join(layers: Sequence[nn.Module]) -> bool:
    """Whether these may be computed as one: they are alike in size, so that a budget keeps all of them or none."""
    plain = all(type(layer) is nn.Linear and "forward" not in layer.__dict__ for layer in layers)
    return plain and len({(layer.weight.shape, layer.bias is None) for layer in layers}) == 1


def joins(model: nn.Module) -> bool:
    """Whether a model has layers that may be computed as one."""
    groups = ((module, names) for module in model.modules() if (names := getattr(module, "projections", ())))
    return any(can_join([getattr(module, name) for name in names]) for module, names in groups)


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors one behind the other along their first dim: a view where they lie so in one memory, else a copy."""
    first, end = tensors[0], tensors[0].storage_offset()
    for one in tensors:
        together = one.untyped_storage()._cdata == first.untyped_storage()._cdata and one.is_contiguous()
        if not together or one.storage_offset() != end:
            return torch.cat(list(tensors))
        end += one.numel()
    return first.as_strided((sum(map(len, tensors)), *first.shape[1:]), first.stride())


@torch.library.custom_op(JOINED, mutates_args=())
def _project(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    """x [..., D], weights [n, D] each -> [..., sum n]."""
    rows, weight = x.flatten(0, -2), joined(weights).t()
    out = torch.addmm(joined(biases), rows, weight) if biases else torch.mm(rows, weight)
    return out.view(*x.shape[:-1], out.shape[-1])


@torch.library.custom_op("longtake::project_backward", mutates_args=())
def _project_backward(
    grad: Tensor, x: Tensor, weights: Sequence[Tensor], of_x: bool, of_weights: bool, of_biases: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, of all weights [sum n, D] and of all biases [sum n]; what is not asked for is empty."""
    rows = grad.flatten(0, -2)
    dx = torch.mm(rows, joined(weights)).view(x.shape) if of_x else grad.new_empty(0)
    dw = torch.mm(rows.t(), x.flatten(0, -2)) if of_weights else grad.new_empty(0)
    return dx, dw, rows.sum(0) if of_biases else grad.new_empty(0)


OPENED[torch.ops.longtake.project.default] = _project._init_fn
OPENED[torch.ops.longtake.project_backward.default] = _project_backward._init_fn


@register_flop_formula(torch.ops.longtake.project)
def _flops(x: Sequence[int], weights: Sequence[Sequence[int]], *rest: Any, **named: Any) -> int:
    return sum(2 * math.prod(x) * outputs for outputs, _ in weights)


@register_flop_formula(torch.ops.longtake.project_backward)
def _flops_backward(
    grad: Any,
    x: Sequence[int],
    weights: Sequence[Sequence[int]],
    of_x: bool,
    of_weights: bool,
    *rest: Any,
    **named: Any,
) -> int:
    return (of_x + of_weights) * _flops(x, weights)


@_project.register_fake
def _(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    return x.new_empty(*x.shape[:-1], sum(weight.shape[0] for weight in weights))


@_project_backward.register_fake
def _(
    grad: Tensor, x: Tensor, weights: Sequence[Tensor], of_x: bool, of_weights: bool, of_biases: bool
) -> tuple[Tensor, Tensor, Tensor]:
    outputs, inputs = grad.shape[-1], x.shape[-1]
    sizes = tuple(x.shape) if of_x else (0,), (outputs, inputs) if of_weights else (0,), (outputs if of_biases else 0,)
    dx, dw, db = (grad.new_empty(size) for size in sizes)
    return dx, dw, db


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weights, biases = inputs
    ctx.sizes, ctx.num_biases = [weight.shape[0] for weight in weights], len(biases)
    ctx.save_for_backward(x, *weights)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, *weights = ctx.saved_tensors
    of_x, of_weights, of_biases = ctx.needs_input_grad
    asked = of_x, any(of_weights), any(of_biases)
    dx, dw, db = _project_backward(grad, x, weights, *asked)
    return (
        dx if of_x else None,
        _of_each(dw, ctx.sizes, of_weights),
        _of_each(db, ctx.sizes[: ctx.num_biases], of_biases),
    )


def _of_each(whole: Tensor, sizes: Sequence[int], asked: Sequence[bool]) -> list[Tensor | None]:
    if not any(asked):
        return [None for _ in sizes]
    return [part if needed else None for part, needed in zip(whole.split(list(sizes)), asked, strict=True)]


_project.register_autograd(_gradients, setup_context=_save)
