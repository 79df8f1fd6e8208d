"""Memory of a denoiser's forward in addition to its weights, and a check that the device has it."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from longtake.models.build import LatentSize, build_denoiser, denoiser_class
from longtake.models.trace import Trace, as_on_cuda, meta_conditions
from longtake.parallel.mesh import TokenPeers
from longtake.parallel.shard import cut_among
from longtake.system.build import System

_USABLE = 0.9  # of the free memory; the rest is for what a trace does not see and for fragments


@lru_cache(maxsize=64)
def forward_bytes(
    config: Any,
    latent: LatentSize,
    text_tokens: int,
    samples: int,
    dtype: torch.dtype = torch.bfloat16,
    sequence: int = 1,
    tensor: int = 1,
    attention: str = "auto",
) -> dict[str, int]:
    """Bytes on one rank, weights apart, at the worst moment of each list of blocks in a forward without gradients, by a
    trace of two blocks of each."""
    with torch.device("meta"):
        model = as_on_cuda(build_denoiser(config), dtype)
    lists = {name: model.get_submodule(name)[:2] for name in model.blocks}
    for name, blocks in lists.items():
        model.set_submodule(name, blocks)
    if sequence * tensor > 1:
        cut_among(model, TokenPeers.counted(sequence, tensor, attention, denoiser_class(config).heads(config)))
    x, t = torch.empty(samples, *latent, device="meta"), torch.empty(samples, device="meta")
    conditions = meta_conditions(config, latent, text_tokens, samples)
    found = dict.fromkeys(lists, 0)

    def note(name: str, *_: Any) -> None:
        found[name], trace.peak = max(found[name], trace.peak), trace.live

    with torch.no_grad(), Trace(model, x, t, *conditions.values(), *conditions.masks.values()) as trace:
        for name, blocks in lists.items():
            for block in blocks:
                block.register_forward_hook(partial(note, name))
        model(x, t, conditions)
    return found


def gathered_bytes(system: System) -> dict[str, int]:
    """Bytes of weights that are gathered while a block of each list runs: it, the next one where others hold a part of
    it, and all outside the blocks. Weights that stay whole are not gathered."""
    model, size = system.denoiser, system.dtype.itemsize

    def of(module: nn.Module) -> int:  # codes of frozen weights are gathered as they are
        sharded = [p for p in module.parameters() if p.requires_grad or isinstance(p, DTensor)]
        return sum(p.numel() * size if p.is_floating_point() else p.nbytes for p in sharded)

    lists = {name: [of(block) for block in model.get_submodule(name)] for name in model.blocks}
    every = sum(sum(blocks) for blocks in lists.values())
    rest = of(model) - every
    ahead = 1 if system.mesh.size == 1 else 2
    whole = system.mesh.config.zero == 2
    return {name: rest + (every if whole else ahead * max(blocks, default=0)) for name, blocks in lists.items()}


def fits_at_once(system: System, samples: int, latent_shape: LatentSize) -> bool:
    """Return whether the denoiser can run so many samples in one forward; the same answer on every rank. Collective.

    On a CPU there always is. Where weights visit the device (`offload_model`), ask while they are there.
    """
    if system.device.type != "cuda":
        return True
    mesh, length = system.mesh, system.facts.text_length
    sequence = mesh.sequence if system.cut is None else system.cut.peers.sequence
    peers = sequence, mesh.tensor, mesh.config.sequence_attention
    moved = forward_bytes(system.config.model, tuple(latent_shape), length, samples, system.dtype, *peers)
    needed = max(moved[name] + weights for name, weights in gathered_bytes(system).items())
    spare = torch.tensor([_USABLE * free_bytes(system.device) - needed], device=system.device)
    if mesh.size > 1:
        dist.all_reduce(spare, dist.ReduceOp.MIN)
    return spare.item() >= 0


def has_room(device: torch.device, num_bytes: int) -> bool:
    """Return whether a CUDA device can allocate so many bytes more."""
    return num_bytes <= _USABLE * free_bytes(device)


def free_bytes(device: torch.device) -> int:
    """Memory of a CUDA device that PyTorch can still take: free, or kept by its allocator for reuse."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
