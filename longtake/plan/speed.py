"""How long a training step takes, from its FLOPs and the bytes that it sends: a forecast with its assumptions in it.

Compute: (3 x forward FLOPs + what is computed again) / (peak x efficiency), and no less than the host takes to start
the kernels one by one, to which a small model's step comes. Of a recomputed block that keeps a part, the rest takes no
less than writing and reading it. Sharded weights, gradients and what is offloaded travel beside it and cost only what
exceeds it; exchanges of tokens between sequence and tensor peers stand in its way and cost all they take. Encoders
run first, at the same rate; peers share the pieces of a video and the captions. The update reads and writes each owned
number a few times. Data and waiting for slower ranks are not in it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from longtake.plan.blocks import count_blocks
from longtake.plan.layout import FP32, Layout, MicroBatch
from longtake.plan.machine import Machine
from longtake.plan.memory import placed_blocks
from longtake.plan.parameters import count_weights


@dataclass(frozen=True)
class MicroBatchTime:
    """Seconds of one micro-batch on the ranks that compute it together."""

    compute: float
    weights_wait: float  # of moving weights, gradients and offloaded activations, what compute does not hide
    token_exchange: float  # between sequence and tensor peers
    mfu: float  # model FLOPs over peak, those of recomputation and of encoders not counted
    encoding: float = 0.0  # of frames and captions

    @property
    def seconds(self) -> float:
        return self.compute + self.weights_wait + self.token_exchange + self.encoding


def forecast_time(
    config: Any, batch: MicroBatch, layout: Layout, machine: Machine, encoder_flops: float = 0.0
) -> MicroBatchTime:
    """The time of a micro-batch, forward and backward; `encoder_flops`: of the rank that has most to encode."""
    counted = count_blocks(config, batch, layout)
    training = 3 * counted.flops
    compute, launches, exchange, stored = training / machine.rate, counted.launches, 0.0, 0.0
    links = {"sequence": _bandwidth(layout.peers, machine), "tensor": _bandwidth(layout.tensor, machine)}
    placed = placed_blocks(config, batch, layout)
    count_of = Counter(map(id, placed))
    for one in {id(one): one for one in placed}.values():
        block, count, forwards = one.block, count_of[id(one)], 2 if one.again else 1
        launches += count * (forwards * block.launches[0] + block.launches[1])
        exchange += count * sum((forwards * there + back) / links[axis] for axis, (there, back) in block.sent.items())
        stored += 2 * count * one.host_bytes
        if one.again:
            made = 2 * (block.saved - block.input - one.kept) if one.kept else 0.0
            compute += count * max((block.flops - one.spared) / machine.rate, made / machine.memory_rate)
    compute = max(compute, launches * machine.launch)
    weights = max(0.0, _weights_seconds(config, layout, machine) + stored / machine.host - compute)
    encoding = encoder_flops / machine.rate
    mfu = training / machine.gpu.peak_flops / (compute + weights + exchange + encoding)
    return MicroBatchTime(compute, weights, exchange, mfu, encoding)


def update_seconds(config: Any, layout: Layout, machine: Machine) -> float:
    """Clipping, AdamW and the average, once a step.

    They read and write: the gradient twice and once; gradient, master and moments read, the latter three written;
    master and average read, average written.
    """
    upkeep = layout.upkeep
    owned = count_weights(config, layout.weight_shards, upkeep, layout.compute_bytes).owned
    weight, moments = upkeep.master_bytes, upkeep.moments_bytes
    update = owned * (6 * weight + 2 * moments)
    average = owned * (weight + 2 * FP32) if layout.ema else 0
    if layout.offload:
        return (update + average) / machine.host
    seconds = (update + average) / machine.memory_rate
    through = 2 * moments * upkeep.moments_offloaded + 2 * FP32 * (layout.ema and upkeep.ema_offloaded)
    return max(seconds, owned * through / machine.host)  # what lives on the host passes through the device


def micro_batch_seconds(config: Any, layout: Layout, machine: Machine, step_seconds: float) -> float:
    """What a micro-batch may take in a step of so many seconds."""
    return max(0.0, step_seconds - update_seconds(config, layout, machine)) / layout.micro_batches


def _weights_seconds(config: Any, layout: Layout, machine: Machine) -> float:
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


def _bandwidth(ranks: int, machine: Machine) -> float:
    """Bytes/s of one GPU in a collective of so many neighbours."""
    inside = ranks <= machine.gpus_per_node
    return machine.bandwidth * (machine.gpu.link_bandwidth if inside else machine.network)
