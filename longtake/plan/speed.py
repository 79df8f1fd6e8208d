"""How long a training step takes, from its FLOPs and the bytes that it sends: a forecast with its assumptions in it.

Compute: (3 x forward FLOPs + what is computed again) / (peak x efficiency). Sharded weights and gradients travel
beside the compute and cost only what exceeds it; exchanges of tokens between sequence and tensor peers stand in its
way and cost all they take. The update reads and writes each owned number a few times. Encoders, data and waiting for
slower ranks are not in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from longtake.models import MMDiT, MMDiTConfig
from longtake.plan.memory import FP32, Layout, MicroBatch
from longtake.plan.parameters import count_weights
from longtake.track import Gpu

# Bytes that clipping, AdamW and EMA read and write for one weight: gradient twice and once written; gradient, master
# and two moments read, the latter three written; master and average read, average written.
_UPDATE_BYTES, _EMA_BYTES = 10 * FP32, 3 * FP32


@dataclass(frozen=True)
class Machine:
    """The GPUs a run is planned for, and what is assumed of them."""

    gpu: Gpu
    gpus_per_node: int = 8
    efficiency: float = 0.4  # share of the peak that the blocks' kernels reach
    bandwidth: float = 0.7  # share of the data sheet's bandwidths that transfers reach
    network: float = 50e9  # bytes/s of one GPU's way to other nodes, one direction
    host: float = 20e9  # bytes/s between one GPU and its share of the host's memory
    headroom: float = 0.08  # share of the memory that CUDA, NCCL and fragments take

    @property
    def usable_bytes(self) -> int:
        """Memory of one GPU that a run may count on."""
        return int(self.gpu.memory_gib * 2**30 * (1 - self.headroom))


@dataclass(frozen=True)
class MicroBatchTime:
    """Seconds of one micro-batch on the ranks that compute it together."""

    compute: float
    weights_wait: float  # of gathering weights and reducing gradients, what compute does not hide
    token_exchange: float  # between sequence and tensor peers
    mfu: float  # model FLOPs over peak, recomputation not counted

    @property
    def seconds(self) -> float:
        return self.compute + self.weights_wait + self.token_exchange


def forecast_time(
    config: MMDiTConfig,
    latent_shape: tuple[int, int, int, int],
    batch: MicroBatch,
    layout: Layout,
    machine: Machine,
) -> MicroBatchTime:
    """The time of a micro-batch of samples with latents (C, F, h, w), forward and backward."""
    peers = layout.sequence * layout.tensor
    forward = MMDiT.forward_flops(config, latent_shape, batch.text_tokens)
    double, single = MMDiT.block_flops(config, latent_shape, batch.text_tokens)
    doubles, singles = min(layout.remat[0], config.depth), min(layout.remat[1], config.depth_single_blocks)
    again = doubles * double + singles * single
    compute = batch.batch * (3 * forward + again) / peers / (machine.gpu.peak_flops * machine.efficiency)
    weights = max(0.0, _weights_seconds(config, layout, machine) - compute)
    exchange = _exchange_seconds(config, batch, layout, machine)
    seconds = compute + weights + exchange
    mfu = 3 * batch.batch * forward / peers / machine.gpu.peak_flops / seconds
    return MicroBatchTime(compute, weights, exchange, mfu)


def update_seconds(config: MMDiTConfig, layout: Layout, machine: Machine) -> float:
    """Clipping, AdamW and the average, once a step."""
    owned = count_weights(config, layout.weight_shards).owned
    moved = owned * (_UPDATE_BYTES + (_EMA_BYTES if layout.ema else 0))
    return moved / (machine.host if layout.offload else machine.gpu.memory_bandwidth * machine.bandwidth)


def _weights_seconds(config: MMDiTConfig, layout: Layout, machine: Machine) -> float:
    """Gathering weights (twice where they are freed in between), reducing gradients over shards, then over replicas."""
    weights = count_weights(config, layout.weight_shards)
    shards, replicas = layout.weight_shards, layout.replicate
    gathers = 2 if layout.zero == 3 else 1
    own = (gathers * layout.compute_bytes + layout.reduce_bytes) * weights.num_parameters * (shards - 1) / shards
    seconds = own / _bandwidth(shards, machine)
    if replicas > 1:
        between = 2 * layout.reduce_bytes * weights.owned * (replicas - 1) / replicas
        seconds += between / _bandwidth(layout.gpus, machine)
    if layout.offload:
        seconds += weights.owned * (gathers * layout.compute_bytes + FP32) / machine.host
    return seconds


def _exchange_seconds(config: MMDiTConfig, batch: MicroBatch, layout: Layout, machine: Machine) -> float:
    """Tokens for heads between sequence peers (q, k, v, result: 4 a block), tokens into and out of tensor regions
    (2 a single block, 4 a double), in forward, in backward, and in forward again where it is computed again."""
    again = min(layout.remat[0], config.depth), min(layout.remat[1], config.depth_single_blocks)
    doubles, singles = 2 * config.depth + again[0], 2 * config.depth_single_blocks + again[1]
    width = config.hidden_size * layout.compute_bytes
    tokens = batch.batch * ceil((batch.video_tokens + batch.text_tokens) / layout.sequence)
    s, t = layout.sequence, layout.tensor
    sequence = 4 * (doubles + singles) * tokens * width / t * (s - 1) / s / _bandwidth(s * t, machine)
    tensor = (4 * doubles + 2 * singles) * tokens * width * (t - 1) / t / _bandwidth(t, machine)
    return sequence + tensor


def _bandwidth(ranks: int, machine: Machine) -> float:
    """Bytes/s of one GPU in a collective of so many neighbours."""
    inside = ranks <= machine.gpus_per_node
    return machine.bandwidth * (machine.gpu.link_bandwidth if inside else machine.network)
