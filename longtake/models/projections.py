"""Several linear layers as one operator, for compute alone: parameters, their names, gradients, optimizer states,
initial values and files stay those of each layer. Layers of one input are one product:

    [y1 | y2 | ...] = x [W1; W2; ...]^T + [b1 | b2 | ...]        dx = dy W, dW = dy^T x, db = sum dy over rows

where the gradients of W and b are then those of each layer, as views of one memory. The joined W is a view where the
weights lie one behind the other in memory, else a copy, which is made again in backward: it exists only while it is
multiplied, for sharded weights are let go of in between.

Layers of parts of a joined input, as attention gives it for several streams, read these where they lie, a sample at a
time, and write gradients into the joined one. One product of several samples would have its rows copied into one piece;
so has only that for the weights' gradients, whose sum over all samples is rounded once.
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

JOINED = "longtake::project", "longtake::project_out"  # the operators: x, weights, ...


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


def project_out(module: nn.Module, x: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """So many tokens of x [B, S, D] through each of the linear layers that `module.ways_out` names: [B, l, n] each.

    By one operator where `fused` says so and all are layers as they were made, see `project`.
    """
    layers = [module.get_submodule(name) for name in module.ways_out]
    if not (fused.uses("project_out") and can_join(layers)):
        return [layer(part) for layer, part in zip(layers, x.split(list(lengths), 1), strict=True)]
    biases = [layer.bias for layer in layers if layer.bias is not None]
    return _project_out(x, [layer.weight for layer in layers], biases, list(lengths))


def can_join(layers: Sequence[nn.Module]) -> bool:
    """Whether these may be computed as one: they are alike in size, so that a budget keeps all of them or none."""
    plain = all(type(layer) is nn.Linear and "forward" not in layer.__dict__ for layer in layers)
    return plain and len({(layer.weight.shape, layer.bias is None) for layer in layers}) == 1


def joins(model: nn.Module, which: str) -> bool:
    """Whether a model has layers that may be computed as one, of one input ("project") or of parts of it
    ("project_out")."""
    named = {"project": "projections", "project_out": "ways_out"}[which]
    groups = ((module, names) for module in model.modules() if (names := getattr(module, named, ())))
    return any(can_join([module.get_submodule(name) for name in names]) for module, names in groups)


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors one behind the other along their first dim: a view where they lie so in one memory, else a copy."""
    first, end = tensors[0], tensors[0].storage_offset()
    for one in tensors:
        together = one.untyped_storage()._cdata == first.untyped_storage()._cdata and one.is_contiguous()
        if not together or one.storage_offset() != end:
            return torch.cat(list(tensors))
        end += one.numel()
    return first.as_strided((sum(map(len, tensors)), *first.shape[1:]), first.stride())


@torch.library.custom_op("longtake::project", mutates_args=())
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


@torch.library.custom_op("longtake::project_out", mutates_args=())
def _project_out(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], lengths: Sequence[int]
) -> list[Tensor]:
    """x [B, S, D], weights [n, D] each -> [B, l, n] each."""
    found = [x.new_empty(x.shape[0], length, weight.shape[0]) for length, weight in zip(lengths, weights, strict=True)]
    for i, part in enumerate(x.split(lengths, 1)):
        for rows, into in zip(part, found[i], strict=True):
            if biases:
                torch.addmm(biases[i], rows, weights[i].t(), out=into)
            else:
                torch.mm(rows, weights[i].t(), out=into)
    return found


@torch.library.custom_op("longtake::project_out_backward", mutates_args=())
def _project_out_backward(
    grads: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor], lengths: Sequence[int],
    of_x: bool, of_weights: Sequence[bool], of_biases: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    """Gradients of x where it is asked for, then of the weights and of the biases that are."""
    found = []
    if of_x:
        found.append(x.new_empty(x.shape))
        for grad, weight, part in zip(grads, weights, found[0].split(lengths, 1), strict=True):
            for rows, into in zip(grad, part, strict=True):
                torch.mm(rows, weight, out=into)
    parts = zip(grads, x.split(lengths, 1), of_weights, strict=True)
    found += [torch.mm(grad.flatten(0, 1).t(), part.flatten(0, 1)) for grad, part, asked in parts if asked]
    return found + [grad.sum((0, 1)) for grad, asked in zip(grads, of_biases, strict=False) if asked]


OPENED[torch.ops.longtake.project.default] = _project._init_fn
OPENED[torch.ops.longtake.project_backward.default] = _project_backward._init_fn
OPENED[torch.ops.longtake.project_out.default] = _project_out._init_fn
OPENED[torch.ops.longtake.project_out_backward.default] = _project_out_backward._init_fn


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


@register_flop_formula(torch.ops.longtake.project_out)
def _flops_out(x: Sequence[int], weights: Sequence[Sequence[int]], *rest: Any, **named: Any) -> int:
    return 2 * math.prod(x) * weights[0][0]  # all layers give as many


@register_flop_formula(torch.ops.longtake.project_out_backward)
def _flops_out_backward(
    grads: Any, x: Sequence[int], weights: Any, lengths: Sequence[int], of_x: bool, of_weights: Sequence[bool],
    *rest: Any, **named: Any,
) -> int:  # fmt: skip
    taken = sum(length for length, asked in zip(lengths, of_weights, strict=True) if asked)
    return of_x * _flops_out(x, weights) + _flops_out((x[0], taken, x[2]), weights)


@_project_out.register_fake
def _(x: Tensor, weights: Sequence[Tensor], biases: Any, lengths: Sequence[int]) -> list[Tensor]:
    return [x.new_empty(x.shape[0], length, weight.shape[0]) for length, weight in zip(lengths, weights, strict=True)]


@_project_out_backward.register_fake
def _(
    grads: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor], lengths: Any, of_x: bool, of_weights: Sequence[bool],
    of_biases: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    own = [weight.new_empty(weight.shape) for weight, asked in zip(weights, of_weights, strict=True) if asked]
    return [x.new_empty(x.shape)] * of_x + own + [x.new_empty(grads[0].shape[-1]) for asked in of_biases if asked]


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


def _save_out(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weights, _, ctx.lengths = inputs
    ctx.save_for_backward(x, *weights)


def _gradients_out(ctx: Any, grads: Sequence[Tensor]) -> tuple[Any, ...]:
    x, *weights = ctx.saved_tensors
    of_x, *of_layers, _ = ctx.needs_input_grad
    found = iter(_project_out_backward(list(grads), x, weights, ctx.lengths, of_x, *of_layers))
    dx = next(found) if of_x else None
    return dx, *([next(found) if asked else None for asked in each] for each in of_layers), None


_project_out.register_autograd(_gradients_out, setup_context=_save_out)
