"""What a forward of the denoiser needs beside its weights, and whether there is room for it on the device."""

from __future__ import annotations

from math import ceil

import torch
import torch.distributed as dist
from torch import nn

from longtake.models import MMDiTConfig, token_grid
from longtake.system.build import System

_USABLE = 0.9  # of the free memory; the rest is for what the formula leaves out and for fragments


def forward_bytes(
    config: MMDiTConfig,
    latent_shape: tuple[int, int, int, int],
    text_tokens: int,
    samples: int,
    compute_bytes: int = 2,
    sequence: int = 1,
    tensor: int = 1,
    gathered: tuple[int, int] = (0, 0),
) -> int:
    """Bytes on one rank at the worst moment of a forward without gradients, of latents (C, F, h, w): activations, and
    `gathered` weights while a double and while a single block runs.

    For each token, in numbers of the compute dtype (D: width, H: width of the MLP's hidden layer).
    double: the stream D, q, k, v normed 3D (5D where one projection makes them) and joined 3D, attention D, the new
    stream D; then for video tokens alone the modulated D, and the MLP before and after its GELU 2H.
    single: the stream D, and the video that went into it D; q and k 2D (4D), v and the MLP's input D + H, attention D;
    the GELU's output H, and both joined D + H.
    Tensor peers hold gathered tokens in and out of a region: 3D. `attention = "math"` has scores, twice.
    """
    D, H, N = config.hidden_size, config.mlp_size, config.num_heads
    frames, rows, columns = token_grid(latent_shape[1:], config.patch_size)
    video = frames * rows * columns
    whole = video + text_tokens
    peers = sequence * tensor
    raw = 2 * D * config.fused_qkv
    double = whole * (9 * D + raw) + video * (D + 2 * H) if config.depth else 0
    single = whole * (7 * D + 3 * H + raw) if config.depth_single_blocks else 0
    more = ceil(3 * whole * D / sequence) if tensor > 1 else 0
    if config.attention == "math":
        more += 2 * N * whole * whole // peers
    return max(
        samples * compute_bytes * (ceil(numbers / peers) + more) + weights
        for numbers, weights in zip((double, single), gathered, strict=True)
    )


def gathered_bytes(system: System) -> tuple[int, int]:
    """Bytes of weights that are gathered while a double and while a single block runs: it, the next one where others
    hold a part of it, and all outside the blocks."""
    model, size = system.denoiser, system.dtype.itemsize

    def of(module: nn.Module) -> int:  # codes of frozen weights are gathered as they are
        return sum(p.numel() * size if p.is_floating_point() else p.nbytes for p in module.parameters())

    kinds = [[of(block) for block in model.get_submodule(name)] for name in model.blocks]
    every = sum(sum(blocks) for blocks in kinds)
    rest = of(model) - every
    if system.mesh.config.zero == 2:
        return rest + every, rest + every
    ahead = 1 if system.mesh.size == 1 else 2
    double, single = (rest + ahead * max(blocks, default=0) for blocks in kinds)
    return double, single


def fits_at_once(system: System, samples: int, latent_shape: tuple[int, int, int, int]) -> bool:
    """Whether the denoiser has room for so many samples in one forward; the same answer on every rank. Collective.

    On a CPU there always is. Where weights visit the device (`offload_model`), ask while they are there.
    """
    if system.device.type != "cuda":
        return True
    mesh = system.mesh
    needed = forward_bytes(
        system.config.model,
        latent_shape,
        system.facts.text_length,
        samples,
        system.dtype.itemsize,
        mesh.sequence,
        mesh.tensor,
        gathered_bytes(system),
    )
    spare = torch.tensor([_USABLE * free_bytes(system.device) - needed], device=system.device)
    if mesh.size > 1:
        dist.all_reduce(spare, dist.ReduceOp.MIN)
    return spare.item() >= 0


def free_bytes(device: torch.device) -> int:
    """Memory of a CUDA device that PyTorch can still take: free, or kept by its allocator for reuse."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
