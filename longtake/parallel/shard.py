"""Cutting a model over the mesh with FSDP2, and filling it in place without ever holding it whole."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils.checkpoint import checkpoint

from longtake.parallel.mesh import Mesh

UNIT_PARAMETERS = 4_000_000  # 8 MB in bf16


def shard_model(model: nn.Module, mesh: Mesh, compute_dtype: torch.dtype) -> None:
    """Shards each repeated block and the rest of `model` in place (FSDP2; HSDP where the mesh replicates).

    Blocks of less than `UNIT_PARAMETERS` are gathered together with the rest: a gather of its own would cost more time
    than the memory it saves is worth.

    Parameters stay float32 (the masters); forward and backward see them in `compute_dtype`; gradients are reduced in
    float32. Inputs are not cast: timesteps reach the model in float32 and it casts by itself.
    """
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    options = {"mesh": mesh.weights, "mp_policy": policy, "reshard_after_forward": mesh.zero == 3}
    for name in model.blocks:
        for block in model.get_submodule(name):
            if sum(p.numel() for p in block.parameters()) >= UNIT_PARAMETERS:
                fully_shard(block, **options)
    fully_shard(model, **options)


def remat_blocks(model: nn.Module, counts: Sequence[int]) -> None:
    """Lets the first `counts[i]` blocks of the model's i-th list forget their activations and compute them again in
    backward: less memory for more time. Call it before `shard_model`. Gradients stay the same.
    """
    for name, count in zip(model.blocks, counts, strict=True):
        for block in list(model.get_submodule(name))[:count]:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a parameter, gradient or state tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def initialise_sharded(model: nn.Module, device: torch.device, seed: int) -> None:
    """Materialises a model built on the meta device and fills it with its initial values.

    Each parameter is drawn whole on the CPU from (seed, its name), this rank's part is kept and the rest freed, so
    the values are the same on every mesh. (FSDP2's own random initialisation is not: each shard would hold the same
    numbers.)
    """
    model.to_empty(device=device)
    for name, parameter in model.named_parameters():
        value = model.initial_value(name, tuple(parameter.shape), seed)
        local_tensor(parameter).copy_(own_part(value, parameter))


def own_part(value: Tensor, like: Tensor) -> Tensor:
    """The part of a whole tensor that this rank holds of the sharded tensor `like`."""
    if not isinstance(like, DTensor):
        return value
    shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    return value[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
