"""How long a training step takes, from its FLOPs and the bytes that it sends: a forecast with its assumptions in it.

Compute: (3 x forward FLOPs + what is computed again) / (peak x efficiency). Sharded weights and gradients travel
beside the compute and cost only what exceeds it; exchanges of tokens between sequence and tensor peers stand in its
way and cost all they take. Encoders run first, at the same rate; peers share the pieces of a video and the
captions. The update reads and writes each owned number a few times. Data and waiting for slower ranks are not in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from longtake.models import MMDiT, MMDiTConfig
from longtake.plan.kept import kept_by_blocks
from longtake.plan.memory import Layout, MicroBatch, block_activations
from longtake.plan.parameters import FP32, count_weights
from longtake.track import Gpu


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
    weights_wait: float  # of moving weights, gradients and offloaded inputs, what compute does not hide
    token_exchange: float  # between sequence and tensor peers
    mfu: float  # model FLOPs over peak, those of recomputation and of encoders not counted
    encoding: float = 0.0  # of frames and captions

    @property
    def seconds(self) -> float:
        return self.compute + self.weights_wait + self.token_exchange + self.encoding


def forecast_time(
    config: MMDiTConfig,
    latent_shape: tuple[int, int, int, int],
    batch: MicroBatch,
    layout: Layout,
    machine: Machine,
    encoder_flops: float = 0.0,
) -> MicroBatchTime:
    """The time of a micro-batch of samples with latents (C, F, h, w), forward and backward.

    encoder_flops: of the rank that has most to encode.
    """
    peers = layout.sequence * layout.tensor
    forward = MMDiT.forward_flops(config, latent_shape, batch.text_tokens)
    rate = machine.gpu.peak_flops * machine.efficiency
    again = recomputing_seconds(config, latent_shape, batch, layout, machine)
    compute = 3 * batch.batch * forward / peers / rate + again
    beside = _weights_seconds(config, layout, machine) + _inputs_seconds(config, batch, layout, machine)
    weights = max(0.0, beside - compute)
    exchange = _exchange_seconds(config, batch, layout, machine)
    encoding = encoder_flops / rate
    seconds = compute + weights + exchange + encoding
    mfu = 3 * batch.batch * forward / peers / machine.gpu.peak_flops / seconds
    return MicroBatchTime(compute, weights, exchange, mfu, encoding)


def recomputing_seconds(
    config: MMDiTConfig,
    latent_shape: tuple[int, int, int, int],
    batch: MicroBatch,
    layout: Layout,
    machine: Machine,
) -> float:
    """What is computed again in backward: forwards without what was kept.

    A block of which something was kept takes no less than writing and reading what it makes again.
    """
    total, peers = batch.video_tokens + batch.text_tokens, layout.sequence * layout.tensor
    again = {"double": min(layout.remat[0], config.depth), "single": min(layout.remat[1], config.depth_single_blocks)}
    flops = dict(zip(again, MMDiT.block_flops(config, latent_shape, batch.text_tokens), strict=True))
    seconds = 0.0
    for kind, count in again.items():
        kept = kept_by_blocks(config, layout.budget, layout.tensor)[kind]
        size = block_activations(config, kind, batch, layout)
        spared = 2 * total * kept.products_inputs * layout.tensor
        if kept.attention and layout.ring(config.num_heads) == 1:
            spared += 4 * total**2 * config.hidden_size
        computing = batch.batch * (flops[kind] - spared) / peers / (machine.gpu.peak_flops * machine.efficiency)
        moving = 2 * (size.saved - size.input - size.kept) / (machine.gpu.memory_bandwidth * machine.bandwidth)
        seconds += count * (max(computing, moving) if kept else computing)
    return seconds


def update_seconds(config: MMDiTConfig, layout: Layout, machine: Machine) -> float:
    """Clipping, AdamW and the average, once a step.

    They read and write: the gradient twice and once; gradient, master and moments read, the latter three written;
    master and average read, average written.
    """
    upkeep = layout.upkeep
    owned = count_weights(config, layout.weight_shards, upkeep, layout.compute_bytes).owned
    weight, moments = upkeep.master_bytes, upkeep.moments_bytes
    update = owned * (6 * weight + 2 * moments)
    average = owned * (weight + 2 * FP32) if layout.ema else 0
    device = machine.gpu.memory_bandwidth * machine.bandwidth
    if layout.offload:
        return (update + average) / machine.host
    seconds = (update + average) / device
    through = 2 * moments * upkeep.moments_offloaded + 2 * FP32 * (layout.ema and upkeep.ema_offloaded)
    return max(seconds, owned * through / machine.host)  # what lives on the host passes through the device


def _weights_seconds(config: MMDiTConfig, layout: Layout, machine: Machine) -> float:
    """Gathering weights (twice where they are freed in between), reducing gradients over shards, then over replicas."""
    weights = count_weights(config, layout.weight_shards, layout.upkeep, layout.compute_bytes)
    shards, replicas = layout.weight_shards, layout.replicate
    gathers = 2 if layout.zero == 3 else 1
    units = [*weights.blocks, weights.rest]
    gathered = sum(layout.compute_bytes * unit.gathered + unit.codes for unit in units)
    own = (gathers * gathered + layout.reduce_bytes * weights.num_trained) * (shards - 1) / shards
    seconds = own / _bandwidth(shards, machine)
    if replicas > 1:
        between = 2 * layout.reduce_bytes * weights.owned * (replicas - 1) / replicas
        seconds += between / _bandwidth(layout.gpus, machine)
    if layout.offload:
        seconds += weights.owned * (gathers * layout.compute_bytes + FP32) / machine.host
    return seconds


def _inputs_seconds(config: MMDiTConfig, batch: MicroBatch, layout: Layout, machine: Machine) -> float:
    """Inputs of recomputed blocks to the host's memory and back, as far as there is room for them."""
    blocks = min(layout.remat[0], config.depth) + min(layout.remat[1], config.depth_single_blocks)
    size = block_activations(config, "single", batch, layout).input
    return 2 * min(blocks * size, layout.buffer_bytes) / machine.host


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
