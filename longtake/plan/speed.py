"""Duration of a training step, by the rates of GPUs at each kind of work: a forecast with its assumptions in it.

Compute: FLOPs of matrix products and of attention, forward, backward and again where blocks are recomputed, and the
bytes that all other kernels read and write, each over its rate (`rates`); and no less than the host takes to start the
kernels one by one, to which a small model's step comes. Sharded weights, gradients and what is offloaded travel beside
it and cost only what exceeds it, but for offloaded weights of which a rank holds all: FSDP2 copies these on the stream
that computes. Exchanges of tokens between sequence and tensor peers stand in its way and cost all they take. Encoders
run first; peers share the pieces of a video and the captions. The update reads and writes each owned number a few
times. Data and waiting for slower ranks are not in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from longtake.plan.blocks import Blocks, Pass, count_blocks
from longtake.plan.layout import FP32, Layout, MicroBatch
from longtake.plan.machine import Machine
from longtake.plan.memory import NOTHING_AGAIN, placed_blocks
from longtake.plan.parameters import Weights, weights_of


class EncoderWork(NamedTuple):
    """FLOPs of the rank that has most to encode."""

    convolutions: float = 0.0
    products: float = 0.0


_FLOAT8 = 1.5  # times as fast as in bf16, an assumption: twice the peak, and sizes that do not reach it
NOTHING_ENCODED = EncoderWork()


@dataclass(frozen=True)
class MicroBatchTime:
    """Seconds of one micro-batch on the ranks that compute it together."""

    parts: Mapping[str, float]  # of computing
    weights_wait: float  # of moving weights, gradients and offloaded activations, what compute does not hide
    token_exchange: float  # between sequence and tensor peers
    mfu: float  # model FLOPs over peak, those of recomputation and of encoders not counted
    limit: float  # seconds of nothing but its products and attention, nothing computed twice
    encoding: float = 0.0  # of frames and captions

    @property
    def compute(self) -> float:
        return sum(self.parts.values())

    @property
    def seconds(self) -> float:
        return self.compute + self.weights_wait + self.token_exchange + self.encoding


def forecast_time(
    config: Any, batch: MicroBatch, layout: Layout, machine: Machine, encoders: EncoderWork = NOTHING_ENCODED
) -> MicroBatchTime:
    """Return the time of a micro-batch, forward and backward."""
    counted, rates, links = count_blocks(config, batch, layout), machine.rates, _links(layout, machine)
    forward, backward = counted.beside, counted.beside.plus(counted.beside)
    again, exchange, stored = NOTHING_AGAIN, 0.0, 0.0
    placed = placed_blocks(config, batch, layout)
    count_of = Counter(map(id, placed))
    for one in {id(one): one for one in placed}.values():
        block, count, forwards = one.block, count_of[id(one)], 2 if one.recomputed else 1
        forward, backward = forward.plus(block.forward, count), backward.plus(block.backward, count)
        again = again.plus(one.again, count)
        exchange += count * sum((forwards * there + back) / links[axis] for axis, (there, back) in block.sent.items())
        stored += 2 * count * one.host_bytes
    parts = _compute(config, (forward, backward, again), layout, machine)
    compute = sum(parts.values())
    hidden, exposed = _offload_seconds(config, layout, machine)
    hidden += _weights_seconds(config, layout, machine) + stored / rates.host
    weights = exposed + max(0.0, hidden - compute)
    encoding = encoders.convolutions / rates.convolutions + encoders.products / rates.products
    mfu = 3 * forward.flops / machine.gpu.peak_flops / (compute + weights + exchange + encoding)
    limit = parts["products"] * _speedup(layout) + parts["attention"]  # of bf16
    return MicroBatchTime(parts, weights, exchange, mfu, limit, encoding)


def _compute(config: Any, passes: tuple[Pass, Pass, Pass], layout: Layout, machine: Machine) -> dict[str, float]:
    """Seconds of forward, backward and recomputation, by kind."""
    rates, (forward, backward, again) = machine.rates, passes
    there, back = rates.attention_of(config.head_dim)
    copies = _copies(machine)
    products = rates.products * _speedup(layout)
    parts = {
        "products": (forward.products + backward.products) / products,
        "attention": forward.attention / there + backward.attention / back,
        "elementwise": (forward.moved + backward.moved) / copies,
        "recomputation": again.products / products + again.attention / there + again.moved / copies,
        "casts": _cast_bytes(config, layout) / copies,
    }
    launched = sum(one.launches for one in passes) * rates.launch
    return parts | {"launches": max(0.0, launched - sum(parts.values()))}


def _speedup(layout: Layout) -> float:
    """Of products, over bf16."""
    return _FLOAT8 if layout.float8 else 1.0


def _cast_bytes(config: Any, layout: Layout) -> float:
    """Masters are read and written in the compute dtype, gathered weights copied to where they are used, and gradients
    copied in another dtype before they are added up."""
    weights, compute = weights_of(config, layout), layout.compute_bytes
    cast = sum(
        times * ((layout.upkeep.master_bytes + compute) * unit.owned + 2 * compute * unit.gathered)
        for unit, times in weights.gathers(layout.zero)
    )
    return cast + (compute + layout.reduce_bytes) * weights.num_trained


def _gathered_bytes(weights: Weights, layout: Layout) -> float:
    """Of all weights that are gathered once, in the compute dtype; quantized ones are counted apart."""
    return layout.compute_bytes * sum(unit.gathered for unit in (*weights.blocks, weights.rest))


def forward_seconds(config: Any, counted: Blocks, layout: Layout, machine: Machine) -> float:
    """Of a forward alone, as in sampling, where weights are gathered beside it and exchanges stand in its way."""
    rates, one, links = machine.rates, counted.forward, _links(layout, machine)
    there, _ = rates.attention_of(config.head_dim)
    compute = one.products / rates.products + one.attention / there + one.moved / _copies(machine)
    exchange = sum(sent / links[axis] for block in counted.blocks for axis, (sent, _) in block.sent.items())
    shards = layout.weight_shards
    weights = weights_of(config, layout)
    gathering = _gathered_bytes(weights, layout) * (shards - 1) / shards / _bandwidth(shards, machine)
    return float(max(compute, one.launches * rates.launch, gathering) + exchange)


def update_seconds(config: Any, layout: Layout, machine: Machine) -> float:
    """Clipping, AdamW and the average, once a step.

    They read and write: the gradient twice and once; gradient, master and moments read, the latter three written;
    master and average read, average written.
    """
    upkeep = layout.upkeep
    owned = weights_of(config, layout).owned
    weight, moments = upkeep.master_bytes, upkeep.moments_bytes
    update = owned * (6 * weight + 2 * moments)
    average = owned * (weight + 2 * FP32) if layout.ema else 0
    if layout.offload:
        return (update + average) / machine.rates.host
    seconds = (update + average) / machine.rates.copies
    through = 2 * moments * upkeep.moments_offloaded + 2 * FP32 * (layout.ema and upkeep.ema_offloaded)
    return max(seconds, owned * through / machine.rates.host)  # what lives on the host passes through the device


def micro_batch_seconds(config: Any, layout: Layout, machine: Machine, step_seconds: float) -> float:
    """Return the time for a micro-batch, in seconds, within a step of so many seconds."""
    return max(0.0, step_seconds - update_seconds(config, layout, machine)) / layout.micro_batches


def _weights_seconds(config: Any, layout: Layout, machine: Machine) -> float:
    """Gathering weights, reducing gradients over shards, then over replicas."""
    weights = weights_of(config, layout)
    shards, replicas = layout.weight_shards, layout.replicate
    gathered = sum(
        times * (layout.compute_bytes * unit.gathered + unit.codes) for unit, times in weights.gathers(layout.zero)
    )
    own = (gathered + layout.reduce_bytes * weights.num_trained) * (shards - 1) / shards
    seconds = own / _bandwidth(shards, machine)
    if replicas > 1:
        between = 2 * layout.reduce_bytes * weights.owned * (replicas - 1) / replicas
        seconds += between / _bandwidth(layout.gpus, machine)
    return seconds


def _offload_seconds(config: Any, layout: Layout, machine: Machine) -> tuple[float, float]:
    """Copy of offloaded weights to the device and of gradients to the host: those that computing can hide, and those
    that it waits for. Masters are copied as they are and cast on the device."""
    if not layout.offload:
        return 0.0, 0.0
    weights, master = weights_of(config, layout), layout.upkeep.master_bytes
    there = sum(times * (master * unit.owned + unit.frozen) for unit, times in weights.gathers(layout.zero))
    back, rate = master * weights.owned, machine.rates.host
    if layout.weight_shards == 1:
        return back / rate, there / rate
    return (there + back) / rate, 0.0


def _copies(machine: Machine) -> float:
    """Bytes/s of kernels that only move; where one share of the peak is for all kernels they take no time of their
    own."""
    return machine.rates.copies if machine.efficiency is None else float("inf")


def _links(layout: Layout, machine: Machine) -> dict[str, float]:
    """Bytes/s of one GPU between the peers of each axis."""
    return {"sequence": _bandwidth(layout.peers, machine), "tensor": _bandwidth(layout.tensor, machine)}


def _bandwidth(ranks: int, machine: Machine) -> float:
    """Bytes/s of one GPU in a collective of so many neighbours."""
    inside = ranks <= machine.gpus_per_node
    return machine.rates.links if inside else machine.bandwidth * machine.network
