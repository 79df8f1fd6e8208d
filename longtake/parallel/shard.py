"""Distributing a model over the mesh, and initialising it without ever holding it whole.

The order is: `cut_model` (sequence and tensor peers), `recompute_and_compile`, `shard_model` (FSDP2).
FSDP2 takes 0.7 s to import; what only cuts and counts a model does without it.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from longtake.models.initial import initial_values
from longtake.parallel.mesh import Mesh, TokenPeers
from longtake.parallel.older_fsdp import mend_fsdp
from longtake.parallel.sequence import cut_sequence
from longtake.parallel.tensor import cut_layers
from longtake.parallel.tokens import TokenCut

UNIT_PARAMETERS = 4_000_000  # 8 MB in bf16


def cut_model(model: nn.Module, mesh: Mesh, like: TokenCut | None = None) -> TokenCut | None:
    """Apply sequence and tensor parallelism over the peers of `mesh`, in place; None where there are no peers.
    `like`: the cut of another model of the same class and sizes, which is then that of both.

    The model then takes the same inputs and returns the same prediction on all peers; it is cut as its `sequence_plan`
    and `tensor_plan` say. Call it first, on any device. Collective. Raises `UserError` where heads or layers do not
    divide.
    """
    if mesh.num_peers == 1:
        return None
    heads = type(model).heads(model.config)
    mesh.check_model(type(model), heads)
    return cut_among(model, mesh.token_peers(heads) if like is None else like.peers, like)


def cut_among(model: nn.Module, peers: TokenPeers, like: TokenCut | None = None) -> TokenCut:
    """Return the same for peers that are known already, or that are counted alone (`TokenPeers.counted`)."""
    cut = TokenCut(peers, model.sequence_plan.tensor_units) if like is None else like
    cut_sequence(model, cut)
    if peers.tensor > 1:
        cut_layers(model, cut)
    return cut


def shard_model(model: nn.Module, mesh: Mesh, compute_dtype: torch.dtype) -> None:
    """Shard each repeated block and the rest of `model` in place (FSDP2; HSDP where the mesh replicates).

    Blocks of less than `UNIT_PARAMETERS` are gathered with the rest: a gather of their own costs too much time for the
    memory it saves. The last block and the rest stay gathered until their backward, which begins with them. Frozen
    parameters stay as they are where each rank holds all of them (`stay_whole`). Trained parameters stay float32
    (masters), frozen ones keep their dtype; forward and backward use `compute_dtype`; gradients are summed in
    `parallel.reduce_dtype`. Inputs are not cast: timesteps stay float32.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    config = mesh.config
    reduce_dtype = torch.bfloat16 if config.reduce_dtype == "bf16" else torch.float32
    options = {
        "mesh": mesh.weights,
        "mp_policy": MixedPrecisionPolicy(compute_dtype, reduce_dtype, cast_forward_inputs=False),
        "offload_policy": CPUOffloadPolicy() if offloads(mesh) else OffloadPolicy(),
    }
    resident = set(filter(partial(stay_whole, mesh=mesh), model.parameters()))
    options["ignored_params"] = resident
    lists = [list(model.get_submodule(name)) for name in model.blocks]
    blocks = chain(*(zip(*lists, strict=True) if getattr(model, "in_turn", False) else lists))
    large = [
        block
        for block in blocks
        if sum(p.numel() for p in block.parameters() if p not in resident) >= max(1, UNIT_PARAMETERS)
    ]
    mend_fsdp()
    units = [fully_shard(block, **options, reshard_after_forward=config.zero == 3) for block in large[:-1]]
    units += [fully_shard(block, **options, reshard_after_forward=False) for block in large[-1:]]
    fully_shard(model, **options, reshard_after_forward=False)
    if config.zero == 3:
        model.register_forward_hook(partial(_free_without_backward, large[-1:]))
    for depth, order, prefetch in (
        (config.forward_prefetch, units, "set_modules_to_forward_prefetch"),
        (config.backward_prefetch, units[::-1], "set_modules_to_backward_prefetch"),
    ):
        for i, unit in enumerate(order):
            if depth and order[i + 1 :]:
                getattr(unit, prefetch)(order[i + 1 : i + 1 + depth])


def stay_whole(parameter: nn.Parameter, mesh: Mesh) -> bool:
    """Frozen parameters of which each rank holds all: FSDP2 would copy them twice in each micro-batch. Those that are
    offloaded to the CPU must be gathered."""
    return mesh.weights.size(-1) == 1 and not parameter.requires_grad and not offloads(mesh)


def _free_without_backward(last: list[nn.Module], model: nn.Module, *_: Any) -> None:
    """Free, after a forward without gradients, weights that otherwise stay gathered until the backward."""
    if not torch.is_grad_enabled():
        for module in (*last, model):
            module.reshard()


def gather_anew(model: nn.Module) -> None:
    """Free weights that are still gathered, so that the next forward gathers the current shards."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def offloads(mesh: Mesh) -> bool:
    """Return whether masters and optimizer are on the CPU while the model computes elsewhere; on a CPU they are
    anyway."""
    return mesh.config.cpu_offload and mesh.weights.device_type != "cpu"


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a parameter, gradient or state tensor, sharing its memory."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def initialise_sharded(model: nn.Module, device: torch.device, seed: int, given: Collection[str] = frozenset()) -> None:
    """Materialise a model built on the meta device with its initial values; `given`: parameters that the caller fills.

    Each parameter is drawn whole on `device` from (seed, its name) and only this rank's part is kept, so the values are
    the same on every mesh. (With FSDP2's own initialisation each shard would hold the same numbers.)
    """
    model.to_empty(device=device)
    parameters = dict(model.named_parameters())
    for name in (name for name in parameters if name not in given):
        with device:
            drawn = initial_values(model, name, seed)
        for part, value in drawn.items():
            local_tensor(parameters[part]).copy_(own_part(value, parameters[part]))


def own_part(value: Tensor, like: Tensor) -> Tensor:
    """Return the part of a whole tensor that this rank holds of the sharded tensor `like`."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(like, DTensor):
        return value
    shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    return value[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
