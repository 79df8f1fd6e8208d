"""A plan as plain data and in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from longtake.config.dump import literal
from longtake.models.build import block_counts
from longtake.pages import duration, money, number
from longtake.parallel.recomputation import level_text, levels_text
from longtake.plan.failures import failures_json
from longtake.plan.layout import FP32
from longtake.plan.machine import Machine
from longtake.plan.remedies import find_remedies, gib
from longtake.plan.run import EntryPlan, RunPlan
from longtake.plan.speed import micro_batch_seconds

if TYPE_CHECKING:
    from longtake.plan.probe import Probed


def plan_json(plan: RunPlan, probed: Sequence[Probed] = (), validation: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the plan as plain data: bytes, seconds, counts; what was measured, where it was; what a
    validation takes."""
    layout, machine, forecast = plan.layout, plan.machine, plan.forecast
    return {
        "gpus": layout.gpus,
        "gpu": machine.gpu.name,
        "usable_bytes": machine.usable_bytes,
        "target_step_seconds": plan.target_seconds,
        "host_bytes": plan.host_bytes,
        "parameters": plan.num_parameters,
        "layout": {
            "replicate": layout.replicate,
            "shard": layout.shard,
            "sequence": layout.sequence,
            "tensor": layout.tensor,
            "zero": layout.zero,
            "remat": list(layout.remat) or [0] * len(block_counts(plan.work.model)),
            "recompute": layout.level,
            "remat_buffer_bytes": layout.buffer_bytes,
            "offload": layout.offload,
            "micro_batches": layout.micro_batches,
            "bucket_sequence": {entry.name: entry.sequence for entry in plan.entries},
        },
        "trained_parameters": plan.weights.num_trained,
        "encoder_bytes": plan.work.encoder_bytes,
        "assumed": {
            "efficiency": machine.efficiency,
            "rates": asdict(machine.rates),
            "bandwidth": machine.bandwidth,
            "network_bytes_per_second": machine.network,
            "headroom": machine.headroom,
            "peak_flops": machine.gpu.peak_flops,
        },
        "buckets": {entry.name: _entry_json(entry) for entry in plan.entries},
        "probe": {one.entry.name: _probed_json(one) for one in probed},
        "stage": {
            "steps_per_pass": forecast.steps_per_pass,
            "seconds_per_pass": forecast.seconds_per_pass,
            "steps": forecast.steps,
            "step_seconds": forecast.step_seconds,
            "measured": forecast.measured,
            "days": forecast.days,
            "gpu_hours": forecast.gpu_hours,
        },
        "failures": failures_json(plan),
        "validation": validation,
        "fits": not plan.misfits,
        "remedies": [
            {"change": remedy.words, "slower": round(remedy.slower, 4), "same_steps": remedy.same_steps}
            for remedy in find_remedies(plan)
        ],
        "clips": None if plan.report is None else plan.report.to_json(),
        "no_clips": plan.no_report,
    }


def _entry_json(entry: EntryPlan) -> dict[str, Any]:
    return {
        "ratio": entry.bucket.ratio,
        "shape": list(entry.bucket.shape),
        "tokens": entry.tokens,
        "recompute": entry.level,
        "batch_size": entry.bucket.batch_size,
        "sequence": entry.sequence,
        "slot_size": entry.slot_size,
        "samples": entry.samples,
        "bytes": entry.memory.parts() | {"total": entry.memory.total},
        "encoding_bytes": entry.encoding_bytes,
        "fits": entry.fits,
        "seconds": {
            "compute": entry.time.compute,
            "parts": dict(entry.time.parts),
            "weights_wait": entry.time.weights_wait,
            "token_exchange": entry.time.token_exchange,
            "encoding": entry.time.encoding,
            "total": entry.time.seconds,
            "limit": entry.time.limit,
        },
        "mfu": entry.time.mfu,
        "largest_batch": entry.largest_batch,
        "suggested_batch": entry.suggested_batch,
    }


def _probed_json(one: Probed) -> dict[str, Any]:
    largest = one.largest
    return {
        "largest_batch": 0 if largest is None else largest.batch,
        "suggested_batch": one.suggested_batch,
        "seconds": None if largest is None else largest.seconds,
        "peak_bytes": None if largest is None else largest.peak_bytes,
        "forecast_bytes": one.forecast_bytes,
        "tries": [{"batch": t.batch, "seconds": t.seconds, "peak_bytes": t.peak_bytes} for t in one.tries],
    }


def probe_head() -> tuple[str, ...]:
    """Heads of the columns of `probe_row`."""
    return ("bucket", "batches tried", "fits", "peak GiB", "forecast GiB", "forecast off", "s", "suggested")


def probe_row(one: Probed) -> tuple[str, ...]:
    """Return the measured row of one entry: without encoders, at the largest batch that fits."""
    largest, error = one.largest, one.error
    tried = (f"{step.batch}{'' if step.seconds is not None else ' (out of memory)'}" for step in one.tries)
    measured = largest is not None and largest.peak_bytes is not None
    return (
        one.entry.name,
        ", ".join(tried),
        "0" if largest is None else str(largest.batch),
        f"{largest.peak_bytes / 2**30:.2f}" if measured else "-",
        f"{one.forecast_bytes / 2**30:.2f}",
        "-" if error is None else f"{error:+.1%}",
        "-" if largest is None else f"{largest.seconds:.3g}",
        str(one.suggested_batch),
    )


def batches_words(plan: RunPlan, probed: Sequence[Probed] = ()) -> str:
    """Return the run's `bucket_config` at the batch sizes of a target, as a run file takes it, and which entries miss
    it."""
    batches = {entry.bucket.entry: entry.suggested_batch for entry in plan.entries}
    batches |= {one.entry.bucket.entry: one.suggested_batch for one in probed}
    table = {
        name: {
            frames: (share, max(1, batches[name, frames]) if (name, frames) in batches else batch)
            for frames, (share, batch) in lengths.items()
        }
        for name, lengths in plan.work.config.bucket_config.items()
    }
    target = plan.target_seconds or 0.0
    said = f"for steps of at most {number(target)} s, {'measured' if probed else 'forecast'} batch sizes:"
    lines = [said, f"bucket_config = {literal(table, '', 16)}"]
    limit = micro_batch_seconds(plan.work.model, plan.layout, plan.machine, target)
    late = [entry.name for entry in plan.entries if _seconds_of_one(plan, entry, probed) > limit]
    if late:
        lines.append(f"longer with one sample, which is what they have: {', '.join(late)}")
    if probed and (left := [entry.name for entry in plan.entries if not entry.trains]):
        lines.append(f"not measured but forecast, for no clip is theirs: {', '.join(left)}")
    return "\n".join(lines)


def _seconds_of_one(plan: RunPlan, entry: EntryPlan, probed: Sequence[Probed]) -> float:
    """Of a micro-batch of one sample, as measured where it was; 0 where more than one keeps to the target."""
    chosen = next((one.suggested_batch for one in probed if one.entry.name == entry.name), None)
    if chosen is not None:
        return 0.0 if chosen else math.inf
    return plan.work.time(entry.bucket, plan.layout, plan.machine, 1).seconds


def layout_words(plan: RunPlan) -> str:
    """Describe the model's layout in one line."""
    layout, work = plan.layout, plan.work
    degrees = ("replicate", "shard", "sequence", "tensor")
    parts = [f"{name} {getattr(layout, name)}" for name in degrees if getattr(layout, name) > 1]
    if plan.degrees_differ:
        parts.append(f"{layout.sequence} / sequence micro-batches of a bucket side by side")
    lists = block_counts(work.model)
    firsts = zip(layout.remat or (0,) * len(lists), lists, strict=True)
    counts = [f"{first} {name.removesuffix('blocks').rstrip('_')}".strip() for first, name in firsts]
    parts += [f"zero {layout.zero}", f"recomputed {' + '.join(counts)} blocks"]
    if any(layout.remat):
        levels = dict.fromkeys(level_text(entry.level) for entry in plan.entries)
        parts[-1] += f" at {'auto: ' if layout.level == 'auto' else ''}{' or '.join(levels)}"
    if layout.buffer_bytes:
        parts.append(f"what these save in {gib(layout.buffer_bytes)} of host memory")
    if layout.offload:
        parts.append("weights and optimizer in host memory")
    parts += _upkeep_words(plan)
    parts.append(f"{layout.micro_batches} micro-batch" + ("es" if layout.micro_batches > 1 else "") + " a rank a step")
    return ", ".join(parts)


def level_words(plan: RunPlan) -> str | None:
    """Return the entries of each level, where it is left to the plan and they differ."""
    if len({entry.level for entry in plan.entries}) == 1:
        return None
    return levels_text({entry.name: entry.level for entry in plan.entries})


def _upkeep_words(plan: RunPlan) -> list[str]:
    upkeep, weights = plan.layout.upkeep, plan.weights
    parts = []
    if weights.num_trained != weights.num_parameters:
        parts.append(f"{amount(plan.layout.denoisers * weights.num_trained)} of the parameters train")
    if plan.layout.denoisers > 1:
        parts.append(f"{plan.layout.denoisers} denoisers, one a step")
    if upkeep.master_bytes != FP32:
        parts.append("bf16 masters")
    if upkeep.moments_bytes < 2 * FP32:
        parts.append("8-bit moments")
    if upkeep.moments_offloaded:
        parts.append("moments in host memory")
    if upkeep.ema_offloaded and plan.layout.ema:
        parts.append("average in host memory")
    return parts


def stage_words(plan: RunPlan, price: float | None = None) -> str:
    """Time and cost of the stage in one line; `price`: of a GPU-hour."""
    forecast = plan.forecast
    mean = f"step {number(forecast.step_seconds, 3)} s" + (" as measured" if forecast.measured else "")
    if plan.report is None:
        mean += " (every entry of the bucket table equally often)"
    elif forecast.steps_per_pass:
        mean += f" on average, a pass {forecast.steps_per_pass:,} steps in {duration(forecast.seconds_per_pass or 0)}"
    if forecast.steps is None:
        cost = f"1,000 steps take {_cost(1000 * forecast.step_seconds * forecast.gpus / 3600, price)}"
        return f"{mean}; {cost}; the length of the run follows from the clip table, or from max_steps"
    steps, hours = priced_steps(plan)
    cost = _cost(hours, price)
    if is_endless(plan):
        passes = plan.work.config.epochs
        return f"{mean}, {cost}; no end is set (max_steps): it trains until it is stopped, or for {passes:,} passes"
    said = f"{mean}; {steps:,} steps take {duration(steps * forecast.step_seconds)}, {cost}"
    config = plan.work.config
    if config.max_steps is not None and steps < config.max_steps:
        said += f"; epochs = {config.epochs:,} ends it before max_steps = {config.max_steps:,}"
    return said


def total_words(plans: Sequence[RunPlan], price: float | None = None) -> str:
    """Time and cost of all stages of a run in one line."""
    if any(plan.forecast.steps is None for plan in plans):
        return f"all {len(plans)} stages: the length follows from the clip table, or from max_steps"
    priced = [(plan.forecast.step_seconds, *priced_steps(plan)) for plan in plans]
    seconds, hours = sum(step * steps for step, steps, _ in priced), sum(hours for *_, hours in priced)
    of_passes = ", one pass of those without an end" if any(map(is_endless, plans)) else ""
    return f"all {len(plans)} stages{of_passes}: {duration(seconds)}, {_cost(hours, price)}"


def _cost(hours: float, price: float | None) -> str:
    return f"{number(hours)} GPU-hours" + ("" if price is None else f", {money(hours * price)} at {money(price)} each")


def is_endless(plan: RunPlan) -> bool:
    """Return whether nothing sets the end of the run: it has no last step, and the default number of epochs."""
    config = plan.work.config
    return config.max_steps is None and config.epochs >= type(config).model_fields["epochs"].default


def priced_steps(plan: RunPlan) -> tuple[int, float]:
    """Return the steps whose cost is shown, and their GPU-hours: all of the run, or one pass where it has no end."""
    forecast = plan.forecast
    steps = (forecast.steps_per_pass if is_endless(plan) else forecast.steps) or 0
    return steps, steps * forecast.step_seconds * forecast.gpus / 3600


def assumed_words(plan: RunPlan) -> str:
    """Return a line on the assumptions of the forecast, with the options that change them."""
    machine = plan.machine
    network = f"{machine.network / 1e9:g} GB/s a GPU between nodes of {machine.gpus_per_node}"
    share = f"{machine.bandwidth:.0%} of {machine.gpu.link_bandwidth / 1e9:g} GB/s within a node and of {network}"
    if machine.measured is not None and machine.measured.links is not None:
        links = number(machine.measured.links / 1e9)
        share = f"{machine.bandwidth:.0%} of {network}, and within a node the {links} GB/s that were measured"
    return (
        f"assumed, not measured: transfers reach {share} (--bandwidth-efficiency, --network-gbs, --gpus-per-node), "
        f"{machine.headroom:.0%} of {machine.gpu.memory_gib:g} GiB stay free (--headroom); data loading takes no time, "
        "and micro-batches side by side are of like length (dataset.balance)"
    )


def rates_words(machine: Machine, config: Any) -> str:
    """Return a line on the rates that a forecast assumes for the model of a config, with their source."""
    rates = machine.rates
    there, back = (rate / 1e12 for rate in rates.attention_of(config.model.head_dim))
    moved = f"all else {number(rates.copies / 1e12)} TB/s" if machine.efficiency is None else "all else takes no time"
    return (
        f"rates: {rates.said}: matrix products {number(rates.products / 1e12)} TFLOP/s, attention {number(there)} "
        f"forward and {number(back)} backward, convolutions {number(rates.convolutions / 1e12)}, {moved}; "
        f"a kernel takes the host {number(rates.launch * 1e6)} us"
    )


def amount(count: int) -> str:
    """`11.91 B`, `52.43 M`."""
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.2f} M"


def head_words(plan: RunPlan) -> str:
    """Return the model and the machine in one line."""
    machine = plan.machine
    return (
        f"{amount(plan.num_parameters)} parameters on {plan.layout.gpus} x {machine.gpu.name}, "
        f"{gib(machine.usable_bytes)} of {machine.gpu.memory_gib:g} GiB each to be used"
        + (f", and {gib(plan.host_bytes)} of the host's memory for each" if plan.host_bytes else "")
    )


def entry_head(plan: RunPlan) -> tuple[str, ...]:
    """Heads of the columns of `entry_rows`."""
    degree = ("sequence",) if plan.degrees_differ else ()
    parts = ("weights", "grads", "optim", "ema", "encoders", "gathered", "activ.")
    sizes = ("bucket", "TxHxW", "tokens", "batch", *degree)
    encoding = ("encode GiB", "encode s") if plan.encodes else ()
    return (*sizes, *parts, "GiB a GPU", *encoding, "s", "MFU", "fits", "suggested", "samples")


def entry_rows(plan: RunPlan) -> list[tuple[str, ...]]:
    """Return the entries of the bucket table: their degrees where these differ, parts of their memory in GiB,
    activations and seconds of encoding where there is any, seconds of a micro-batch, batch sizes."""
    return [_entry_row(entry, plan.degrees_differ, plan.encodes) for entry in plan.entries]


def _entry_row(entry: EntryPlan, tell_degree: bool, encodes: bool) -> tuple[str, ...]:
    encoding = (f"{entry.encoding_bytes / 2**30:.2f}", f"{entry.time.encoding:.3g}")
    return (
        entry.name,
        "x".join(map(str, entry.bucket.shape)),
        f"{entry.tokens:,}",
        str(entry.bucket.batch_size),
        *((str(entry.sequence),) if tell_degree else ()),
        *(f"{number / 2**30:.2f}" for number in entry.memory.parts().values()),
        f"{entry.memory.total / 2**30:.1f}" + ("" if entry.fits else " !"),
        *(encoding if encodes else ()),
        f"{entry.time.seconds:.3g}",
        f"{entry.time.mfu:.1%}",
        str(entry.largest_batch),
        str(entry.suggested_batch),
        "?" if entry.samples is None else f"{entry.samples:,}",
    )
