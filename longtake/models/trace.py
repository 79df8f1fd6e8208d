"""Cost of a computation, traced by running the real modules on meta tensors: FLOPs, and bytes allocated and freed.

Nothing is allocated or computed. The meta device would take fused attention and norms apart into small operations that
no GPU runs; a trace sees PyTorch's CUDA kernels in their place.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from longtake.contracts import Conditions
from longtake.models.attention import Attention
from longtake.models.attention_op import OPENED
from longtake.models.build import LatentSize, denoiser_class, example_conditions
from longtake.models.scratch import SCRATCH


class Trace(TorchDispatchMode):
    """Inside `with`, counts what is done to meta tensors; the memory of the modules and tensors named is left out."""

    def __init__(self, *known: nn.Module | Tensor) -> None:
        super().__init__()
        self.flops = 0  # of products: 2 for each multiplication and addition; backward is counted too
        self.attention = 0  # those of them that attention's kernels make
        self.moved = 0  # bytes that all else reads and writes
        self.launches = 0  # operations that make or fill something: kernels that the host has to start
        self.live = self.peak = 0  # bytes now, and the most so far
        self.changes: list[tuple[int, int]] = []  # in order: number of a memory; its bytes, or less them
        self._opened = 0  # operators of ours that are being taken apart
        self._kernels = _CudaKernels()
        self._there: dict[int, tuple[int, Any]] = {}  # address of a memory -> its number, and what notes its end
        for one in known:
            for tensor in (one,) if isinstance(one, Tensor) else (*one.parameters(), *one.buffers()):
                self._there[tensor.untyped_storage()._cdata] = -1, None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the guard against being compiled imports the compiler, 0.6 s, and costs time in every operation

    def __enter__(self) -> Trace:
        super().__enter__()
        self._kernels.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._kernels.__exit__(*error)
        super().__exit__(*error)

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if operation in OPENED:
            before, self._opened = self.flops, self._opened + 1
            with self:
                out = OPENED[operation](*args, **kwargs)
            self._opened -= 1
            self._show(operation, args, out, self.flops - before)
            return out
        out = _known_result(operation, args, kwargs)
        if out is None:
            out = operation(*args, **kwargs)
        formula = flop_registry.get(operation.overloadpacket)
        flops = formula(*args, **kwargs, out_val=out) if formula else 0
        self.flops += flops
        self._show(operation, args, out, flops)
        scratch, scratch_bytes = len(self.changes), SCRATCH[operation](*args) if operation in SCRATCH else 0
        if scratch_bytes:
            self._change(scratch, scratch_bytes)
        before = len(self.changes)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.is_meta:
                self._note(tensor.untyped_storage())
        copies = operation is _aten.copy_.default  # into what is there
        if len(self.changes) > before or "out" in kwargs or copies:
            self.launches += 1
            self.moved += 0 if formula or operation in _EMPTY else _bytes_moved(args[copies:], out)
        self.attention += flops if formula and "attention" in operation._opname else 0
        if scratch_bytes:
            self._change(scratch, -scratch_bytes)
        return out

    def saw(self, operation: Any, args: Sequence[Any], out: Any, flops: int) -> None:
        """Handle an operation: a hook, called with all but those that a custom operator is made of."""

    def _show(self, operation: Any, args: Sequence[Any], out: Any, flops: int) -> None:
        if not self._opened:
            self.saw(operation, args, out, flops)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause counting inside the context; this must be the innermost mode there."""
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()

    def number(self, tensor: Tensor) -> int:
        """Return the number of a tensor's memory in `changes`."""
        return self._there[tensor.untyped_storage()._cdata][0]

    def moments(self, apart: Collection[int] = (), start: int = 0) -> list[tuple[int, int]]:
        """Bytes of the memories numbered `apart`, and of all others, whenever something ends after something began, and
        at the end: the most bytes of all are there at one of these moments. From change `start` on."""
        found, own, others, rises = [], 0, 0, False
        for i, (number, num_bytes) in enumerate(self.changes):
            if num_bytes < 0 and rises and i >= start:
                found.append((own, others))
            rises = num_bytes > 0 or (rises and not num_bytes)
            if number in apart:
                own += num_bytes
            else:
                others += num_bytes
        return [*found, (own, others)]

    def _note(self, storage: torch.UntypedStorage) -> None:
        address, num_bytes = storage._cdata, storage.nbytes()
        if address in self._there:
            return
        number = len(self.changes)

        def end(_: Any) -> None:
            self._there.pop(address, None)
            self._change(number, -num_bytes)

        self._there[address] = number, weakref.ref(storage, end)
        self._change(number, num_bytes)

    def _change(self, number: int, num_bytes: int) -> None:
        self.changes.append((number, num_bytes))
        self.live += num_bytes
        self.peak = max(self.peak, self.live)


def _bytes_moved(args: Sequence[Any], out: Any) -> int:
    """Bytes of the tensors that an operation takes and gives."""
    joined = args[0] if args and isinstance(args[0], list | tuple) else ()
    given = out if isinstance(out, list | tuple) else (out,)
    return sum(one.nbytes for one in (*args, *joined, *given) if isinstance(one, Tensor))


_aten = torch.ops.aten
_NUMBERED = {_aten.arange.default, _aten.arange.start, _aten.arange.start_step}
_JOINED = {_aten.cat.default, _aten.stack.default}
_REDUCED = {_aten.sum.dim_IntList, _aten.sum.default, _aten.mean.dim, _aten.mean.default}
_OF_CODES = {_aten.bitwise_and.Scalar, _aten.__rshift__.Scalar}  # of integers, alike in dtype
_EMPTY = {_aten.empty.memory_format, _aten.empty_strided.default, _aten.new_empty.default}
_ALIKE = {_aten.empty_like.default, _aten.ones_like.default, _aten.zeros_like.default, _aten.gelu.out}
_TO_BOOL = {"eq", "ne", "lt", "le", "gt", "ge", "isfinite", "isinf", "isnan", "isneginf", "isposinf", "signbit"}
_TO_BOOL |= {"logical_and", "logical_not", "logical_or", "logical_xor"}
_BY_ARGUMENTS: dict[Any, Callable[..., Any]] = {
    _aten.mm.default: lambda x, w: x.new_empty(x.shape[0], w.shape[1]),
    _aten.bmm.default: lambda x, w: x.new_empty(*x.shape[:2], w.shape[2]),
    _aten.addmm.default: lambda bias, x, w: x.new_empty(x.shape[0], w.shape[1]),
    _aten.index.Tensor: lambda x, indices: _rows(x, *indices),
    _aten.gt.Scalar: lambda x, _: x.new_empty(x.shape, dtype=torch.bool) if x.is_contiguous() else None,
    _aten.where.self: lambda *tensors: _where(*tensors),
    _aten.slice_backward.default: lambda grad, sizes, *rest: grad.new_empty(sizes),
    _aten._scaled_dot_product_flash_attention.default: lambda *tensors: _flash(*tensors[:3]),
    _aten._scaled_dot_product_flash_attention_backward.default: lambda grad, *rest: tuple(map(_alike, rest[:3])),
}


def _known_result(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of an operation whose result follows from its arguments, else None. PyTorch's kernels for meta
    tensors are written in Python: they take 0.1 to 0.4 ms for these, most of the time of a trace, and import the
    compiler and sympy, 1.4 s."""
    if operation in _NUMBERED and all(isinstance(arg, int) for arg in args) and "device" in kwargs:
        return torch.empty(len(range(*args)), dtype=kwargs.get("dtype") or torch.int64, device=kwargs["device"])
    tensors = [arg for arg in (args[0] if operation in _JOINED else args) if isinstance(arg, Tensor)]
    if not tensors or kwargs.get("dtype") or not all(one.is_meta for one in tensors):
        return None
    first, schema = tensors[0], operation._schema
    if operation in _JOINED:
        return _joined(tensors, *args[1:], new_dim=operation is _aten.stack.default)
    if operation in _BY_ARGUMENTS:
        return _BY_ARGUMENTS[operation](*args)
    if not all(one.is_floating_point() for one in tensors) and operation not in _OF_CODES:
        return None
    if operation in _REDUCED:
        summed = {dim % first.ndim for dim in args[1]} if len(args) > 1 and args[1] else set(range(first.ndim))
        kept, sizes = len(args) > 2 and args[2], enumerate(first.shape)
        return first.new_empty([1 if dim in summed else size for dim, size in sizes if kept or dim not in summed])
    if not (torch.Tag.pointwise in operation.tags or operation in _ALIKE) or len(schema.returns) > 1:
        return None
    if operation._opname in _TO_BOOL or any(isinstance(arg, complex) for arg in args):
        return None
    if kwargs.get("memory_format") not in (None, torch.preserve_format):
        return None
    if schema.is_mutable:
        return kwargs.get("out", first)
    return _of_each(tensors)


def _joined(tensors: Sequence[Tensor], dim: int = 0, *, new_dim: bool) -> Tensor | None:
    first = tensors[0]
    in_order = first.is_contiguous() or first.ndim < 3 or first.stride(1) != 1  # not with channels last
    if not in_order or any(one.dtype != first.dtype or one.ndim != first.ndim for one in tensors):
        return None
    shape = list(first.shape)
    if new_dim:
        shape.insert(dim % (first.ndim + 1), len(tensors))
    else:
        shape[dim] = sum(one.shape[dim] for one in tensors)
    return first.new_empty(shape)


def _of_each(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the result of an operation on each number of these, where it is plain in which order it lies in memory."""
    try:
        shape = np.broadcast_shapes(*(one.shape for one in tensors))  # PyTorch's own imports sympy
    except ValueError:
        return None
    dtype = reduce(torch.promote_types, [one.dtype for one in tensors if one.ndim] or [one.dtype for one in tensors])
    if all(map(_is_in_order, tensors)):
        return torch.empty(shape, dtype=dtype, device="meta")
    first = tensors[0]
    if first.shape != shape or 0 in first.stride():
        return None
    order = sorted(range(len(shape)), key=lambda dim: -first.stride(dim))  # the first decides
    return torch.empty_permuted(shape, order, dtype=dtype, device="meta")


def _rows(x: Tensor, index: Tensor | None, *others: Tensor | None) -> Tensor | None:
    if index is None or others or index.dtype is torch.bool:
        return None
    return x.new_empty(*index.shape, *x.shape[1:])


def _where(mask: Tensor, x: Tensor, y: Tensor) -> Tensor | None:
    return None if y.ndim or np.broadcast_shapes(mask.shape, x.shape) != x.shape else _of_each([x, y])


def _alike(x: Tensor) -> Tensor:
    found = _of_each([x])
    return torch.empty_like(x) if found is None else found


def _flash(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    lse, seed = q.new_empty(q.shape[:3], dtype=torch.float32), q.new_empty(2, dtype=torch.uint64)
    return _alike(q), lse, None, None, q.shape[2], k.shape[2], seed, q.new_empty((), dtype=seed.dtype), q.new_empty(0)


def _is_in_order(x: Tensor) -> bool:
    """Return whether the dims are in descending order of stride."""
    if x.is_contiguous():
        return True
    strides = [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]
    return sorted(strides, reverse=True) == strides


def as_on_cuda(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a model on the meta device, to be traced: in the compute dtype, with attention by a kernel that a trace
    knows."""
    for p in model.parameters():
        if p.is_floating_point():
            p.data = p.data.to(dtype)
    for module in model.modules():
        if isinstance(module, Attention) and module.backend != "math":
            module.backend = "sdpa"
    return model


def meta_conditions(config: Any, latent: LatentSize, text_tokens: int, batch: int) -> Conditions:
    """Return the denoiser's conditions for latents (C, F, h, w), on the meta device; texts with their masks."""
    needs = denoiser_class(config).needs(config, latent, text_tokens)
    of_text = {name: shape[:-1] for name, shape in needs.items() if text_tokens in shape[-2:-1]}
    masks = {name: torch.empty(1, *shape, dtype=torch.bool, device="meta") for name, shape in of_text.items()}
    return example_conditions(config, latent, text_tokens, batch, "meta", given=Conditions({}, masks))


class _CudaKernels(TorchFunctionMode):
    """Attention and norms as a GPU runs them."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            return attention_on_cuda(*args, **kwargs)
        if function in _NORMS:
            return _norm(function, *args, **kwargs)
        return function(*args, **kwargs)


def attention_on_cuda(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *options: Any, **named: Any
) -> Tensor:
    """`F.scaled_dot_product_attention` by the operators that it has on a GPU."""
    if q.ndim != 4:  # without a dim of heads no fused kernel takes it, on a GPU either
        return F.scaled_dot_product_attention(q, k, v, attn_mask, *options, **named)
    if attn_mask is None:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)[0]
    if attn_mask.dtype == torch.bool:
        attn_mask = torch.empty_like(attn_mask, dtype=q.dtype)
    mask = attn_mask.expand(*q.shape[:-1], k.shape[-2])
    return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, mask, torch.is_grad_enabled())[0]


_NORMS = {F.rms_norm: 1, F.layer_norm: 2, F.group_norm: 2}  # numbers in float32 kept for each group


def _norm(function: Any, x: Tensor, groups: Any, weight: Tensor | None = None, *rest: Any, **named: Any) -> Tensor:
    if not x.is_meta:
        return function(x, groups, weight, *rest, **named)
    bias = named.get("bias", next((one for one in rest if isinstance(one, Tensor)), None))
    rows = x.shape[0] * groups if function is F.group_norm else x.shape[: x.ndim - len(groups)].numel()
    return _Norm.apply(x, rows * _NORMS[function], weight, bias)


class _Norm(torch.autograd.Function):
    """Keeps its input and a few numbers of each group that is normed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, numbers: int, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, x.new_empty(numbers, dtype=torch.float32), weight, bias)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, _, weight, bias = ctx.saved_tensors
        learned = (None if one is None else torch.empty_like(one) for one in (weight, bias))
        return torch.empty_like(x), None, *learned
