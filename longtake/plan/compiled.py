"""What a compiled block keeps for its backward: what PyTorch's partitioner, as Inductor calls it, chooses to save.

Forward and backward are traced as one graph on stand-ins of tensors, and cut; no code is generated.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from longtake.durable import write_whole
from longtake.models import attention_on_cuda, storage

if TYPE_CHECKING:
    from torch import fx

_PACKAGE = Path(__file__).resolve().parents[1]
_READ = ("models/*.py", "plan/blocks.py", "plan/compiled.py")  # what says how blocks compute and are looked at


def remembered(look: Callable[[], Any], *facts: Any) -> Any:
    """What `look` finds, as JSON: from the user's cache where it has looked with these facts, this PyTorch and these
    files of ours before, for importing the compiler takes longer than the rest of a plan."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    code = b"".join(path.read_bytes() for one in _READ for path in sorted(_PACKAGE.glob(one)))
    digest = hashlib.sha256(repr((torch.__version__, facts)).encode() + code).hexdigest()
    file = folder / "longtake" / "compiled_blocks" / f"{digest}.json"
    with suppress(OSError, ValueError):
        return json.loads(file.read_text(encoding="utf-8"))
    found = look()
    with suppress(OSError):
        if folder.is_absolute():  # else there is no home
            write_whole(file, json.dumps(found), synced=False)
    return found


def compiled_saved_bytes(
    block: nn.Module, forward: Callable[..., Any], called: Any, own: Collection[int]
) -> tuple[int, int]:
    """Bytes that a block on the meta device keeps from a compiled forward to its backward, its weights and what all
    blocks share left out: of activations, and of what is made of weights alone, such as coded ones in full. called:
    args and keywords of `forward`, its method; own: ids of the tensors among them that come from the block before."""
    from torch._functorch.aot_autograd import aot_function  # these import the compiler
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    leaves, shape = tree_flatten(called)
    tensors: list[Tensor] = []
    _exchanged(leaves, lambda tensor: tensors.append(tensor))
    mode, outs, cut = FakeTensorMode(allow_non_fake_inputs=True), [], []

    def run(weights: dict[str, Tensor], given: list[Tensor]) -> Any:
        each = iter(given)
        args, named = tree_unflatten(_exchanged(leaves, lambda _: next(each)), shape)
        with _Kernels(), torch.nn.utils.stateless._reparametrize_module(block, weights):
            out = forward(*args, **named)
        outs[:] = tree_leaves(out)
        return out

    def partition(joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        cut[:] = min_cut_rematerialization_partition(joint, inputs, compiler="inductor", **options)
        return cut

    def fake(tensor: Tensor) -> Tensor:
        needs_grad = tensor.requires_grad or (trains and id(tensor) in own)  # but the first's, see `_alone`
        # on the meta device the partitioner would choose otherwise among tensors of one size
        return FakeTensor(mode, tensor.detach(), torch.device("cpu")).requires_grad_(needs_grad)

    trains = any(p.requires_grad for p in block.parameters())
    weights = {name: fake(of) for name, of in (*block.named_parameters(), *block.named_buffers())}
    traced = aot_function(run, _as_it_is, _as_it_is, partition, select_decomp_table())
    with mode:
        traced(weights, [fake(tensor) for tensor in tensors])
    storage._nf4.cache_clear()  # lest it holds a stand-in of this mode
    if not cut:
        return 0, 0  # nothing of it trains
    graph = cut[0].graph
    given = [node for node in graph.nodes if node.op == "placeholder"]
    made = graph.output_node().args[0]
    shared = [node for node, tensor in zip(given[len(weights) :], tensors, strict=True) if id(tensor) not in own]
    left_out = {_memory(node)._cdata for node in (*given[: len(weights)], *shared, *made[: len(outs)])}
    of_weights = set(given[: len(weights)])
    for node in graph.nodes:
        if node.op != "placeholder" and of_weights.issuperset(node.all_input_nodes):
            of_weights.add(node)
    kept: dict[int, tuple[int, bool]] = {}
    for node in made[len(outs) :]:
        if isinstance(node.meta["val"], Tensor) and (memory := _memory(node))._cdata not in left_out:
            kept[memory._cdata] = memory.nbytes(), node in of_weights
    activations, fixed = (sum(size for size, alone in kept.values() if alone is one) for one in (False, True))
    return activations, fixed


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
