"""Activations that a compiled block saves for its backward, as PyTorch's partitioner, called as by Inductor, chooses.

Forward and backward are traced as one graph on stand-ins of tensors, and cut; no code is generated.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.flop_counter import flop_registry

from longtake.models import quantized
from longtake.models.trace import attention_on_cuda
from longtake.parallel.exchange import EXCHANGES
from longtake.parallel.recomputation import compiler_budget, saved_as
from longtake.system.float8 import use_float8

if TYPE_CHECKING:
    from torch import fx


def compiled_bytes(
    block: nn.Module, forward: Callable[..., Any], called: Any, own: Collection[int], budget: float = 1.0
) -> tuple[int, int, dict[str, int], tuple[float, float]]:
    """Bytes that a block on the meta device keeps from a compiled forward to its backward, its weights and what all
    blocks share left out: of activations, and of what is made of weights alone, such as dequantized ones; and bytes
    that both passes move beside their products; and FLOPs of matmuls and of attention that backward repeats for a
    `budget`, see `parallel.recomputation`. called: args and keywords of `forward`, its method; own: ids of the
    tensors among them that come from the block before."""
    from torch._functorch.aot_autograd import aot_function  # these import the compiler
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    leaves, shape = tree_flatten(called)
    tensors: list[Tensor] = []
    _exchanged(leaves, lambda tensor: tensors.append(tensor))
    mode, outs, cut, repeated = FakeTensorMode(allow_non_fake_inputs=True), [], [], []

    def run(weights: dict[str, Tensor], given: list[Tensor]) -> Any:
        each = iter(given)
        args, named = tree_unflatten(_exchanged(leaves, lambda _: next(each)), shape)
        with _Kernels(), torch.nn.utils.stateless._reparametrize_module(block, weights):
            out = forward(*args, **named)
        outs[:] = tree_leaves(out)
        return out

    def partition(joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        needed = _flops(joint.graph)
        with compiler_budget(budget):
            cut[:] = min_cut_rematerialization_partition(joint, inputs, compiler="inductor", **options)
        made = [_flops(part.graph) for part in cut]
        repeated[:] = [sum(of) - once for *of, once in zip(*made, needed, strict=True)]
        return cut

    def fake(tensor: Tensor) -> Tensor:
        needs_grad = tensor.requires_grad or (trains and id(tensor) in own)  # but the first's, see `_alone`
        # on the meta device the partitioner would choose otherwise among tensors of one size
        return FakeTensor(mode, tensor.detach(), torch.device("cpu")).requires_grad_(needs_grad)

    trains = any(p.requires_grad for p in block.parameters())
    weights = {name: fake(of) for name, of in (*block.named_parameters(), *block.named_buffers())}
    traced = aot_function(run, _as_it_is, _as_it_is, partition, select_decomp_table())
    for dtype in (torch.bfloat16, torch.float32):
        quantized._nf4(torch.device("cpu"), dtype)  # lest the cache gets a stand-in
    with mode:
        traced(weights, [fake(tensor) for tensor in tensors])
    if not cut:
        return 0, 0, {}, (0.0, 0.0)  # nothing of it trains
    forward, backward = (part.graph for part in cut)
    activations, fixed = _saved(forward, len(weights), len(outs), [id(tensor) not in own for tensor in tensors])
    return activations, fixed, {"forward": _moved(forward), "backward": _moved(backward)}, tuple(repeated)


def _saved(graph: fx.Graph, num_weights: int, num_outs: int, is_shared: Sequence[bool]) -> tuple[int, int]:
    """Bytes that the graph of a forward hands to its backward: of activations, and of what is made of weights alone.
    is_shared: of each input behind the weights, whether all blocks have it."""
    given = [node for node in graph.nodes if node.op == "placeholder"]
    made = graph.output_node().args[0]
    shared = [node for node, one in zip(given[num_weights:], is_shared, strict=True) if one]
    left_out = {_memory(node)._cdata for node in (*given[:num_weights], *shared, *made[:num_outs])}
    of_weights = set(given[:num_weights])
    for node in graph.nodes:
        if node.op != "placeholder" and of_weights.issuperset(node.all_input_nodes):
            of_weights.add(node)
    kept: dict[int, tuple[int, bool]] = {}
    for node in made[num_outs:]:
        if isinstance(node.meta["val"], Tensor) and (memory := _memory(node))._cdata not in left_out:
            kept[memory._cdata] = memory.nbytes(), node in of_weights
    activations, fixed = (sum(size for size, alone in kept.values() if alone is one) for one in (False, True))
    return activations, fixed


def _flops(graph: fx.Graph) -> tuple[float, float]:
    """Of the matmuls of a graph, and of attention in its forward."""
    matmuls = attention = 0.0
    for node in graph.nodes:
        formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
        if formula is not None:
            args, named = torch.fx.node.map_arg((node.args, node.kwargs), lambda of: of.meta["val"])
            flops = formula(*args, **named, out_val=node.meta["val"])
            is_attention = saved_as(node.target, args) == "attention"
            attention += flops if is_attention else 0.0
            matmuls += 0.0 if is_attention else flops
    return matmuls, attention


def _moved(graph: fx.Graph) -> int:
    """Bytes that the fused kernels of a graph at least read and write: what products and attention, the graph's own
    inputs, or its outputs hand to them and take; and the copies that collectives between ranks make."""
    copied = 0
    fused: dict[int, bool] = {}  # memory -> whether a fused kernel makes it
    crossing: dict[int, int] = {}
    for node in graph.nodes:
        taken = {memory._cdata: memory.nbytes() for one in node.all_input_nodes for memory in _memories(one)}
        made = [memory._cdata for memory in _memories(node) if node.op == "call_function"]
        if node.op == "placeholder":
            fused |= dict.fromkeys((memory._cdata for memory in _memories(node)), False)
        elif node.op == "output" or (made and made[0] not in fused):
            is_exchange = _is_exchange(node)
            if is_exchange:
                copied += sum(tensor.nbytes for one in (node, *node.all_input_nodes) for tensor in _values(one))
            product = is_exchange or getattr(node.target, "overloadpacket", None) in flop_registry
            own = node.op != "output" and not product
            crossing |= {memory: size for memory, size in taken.items() if fused.get(memory, own) is not own}
            fused |= dict.fromkeys(made, own)
    return copied + sum(crossing.values())


def _is_exchange(node: fx.Node) -> bool:
    """Attention is one where it is among ranks: its last argument names their group."""
    return str(node.target) in EXCHANGES and bool(node.args[-1])


def _memories(node: fx.Node) -> list[torch.UntypedStorage]:
    return [value.untyped_storage() for value in _values(node)]


def _values(node: fx.Node) -> list[Tensor]:
    return [value for value in tree_leaves(node.meta.get("val")) if isinstance(value, Tensor)]


def multiply_in_float8(model: nn.Module) -> None:
    """Make a model on the meta device multiply, in place, as a run's compiled blocks do with `precision = "fp8"`. What
    the compiler saves of that follows from torchao's layers; for a trace, a cast is one kernel."""
    use_float8(model, torch.device("meta"))
    for layer in model.modules():
        if type(layer).__name__ == "Float8Linear":
            layer.forward = partial(_float8_linear, layer, layer.forward)


def _float8_linear(layer: nn.Linear, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    if not x.is_meta:  # a stand-in for the compiler
        return forward(x)
    out = _Float8Product.apply(x.flatten(0, -2), layer.weight).unflatten(0, x.shape[:-1])
    return out if layer.bias is None else out + layer.bias


class _Float8Product(torch.autograd.Function):
    """x W^T on the meta device: keeps both as they are, and casts them, and what comes back, when it multiplies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        one = x.new_empty((), dtype=torch.float32)
        return torch._scaled_mm(_cast(x), _cast(weight).t(), one, one, out_dtype=x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        casts = _cast(grad), _cast(weight)
        of_x = grad @ weight
        casts = _cast(grad), _cast(x)  # laid out anew: here the tokens are the inner dim
        of_weight = grad.t() @ x
        del casts
        return of_x, of_weight


def _cast(x: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fn)


def _exchanged(value: Any, other: Callable[[Tensor], Any]) -> Any:
    """`value` with another tensor for each in it, in order."""
    if isinstance(value, Tensor):
        return other(value)
    if isinstance(value, list | tuple):
        return type(value)([_exchanged(one, other) for one in value])
    if is_dataclass(value):
        made = copy.copy(value)
        for field in fields(value):
            object.__setattr__(made, field.name, _exchanged(getattr(value, field.name), other))
        return made
    return value


def _as_it_is(graph: fx.GraphModule, inputs: Any) -> fx.GraphModule:
    return graph


def _memory(node: fx.Node) -> torch.UntypedStorage:
    return node.meta["val"].untyped_storage()


class _Kernels(TorchFunctionMode):
    """Attention by the operators of a GPU; the compiler takes all else apart itself."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.scaled_dot_product_attention:
            function = attention_on_cuda
        return function(*args, **(kwargs or {}))
