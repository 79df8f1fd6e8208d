"""A plan as plain data and as one HTML page that holds everything it shows."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtake.durable import write_whole
from longtake.models import block_counts
from longtake.plan.blocks import kept_by_lists
from longtake.plan.layout import FP32
from longtake.plan.remedies import find_remedies, gib, pace
from longtake.plan.run import EntryPlan, RunPlan

if TYPE_CHECKING:
    from longtake.plan.probe import Probed

PART_NAMES = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "ema": "average",
    "encoders": "encoders",
    "gathered": "gathered blocks and buffers",
    "activations": "activations",
}
_COLOURS = ("#2f6fde", "#7aa7ff", "#15794a", "#5fd39a", "#8a6d3b", "#c98a1b", "#b3261e")


def plan_json(plan: RunPlan, probed: Sequence[Probed] = ()) -> dict[str, Any]:
    """The plan as plain data: bytes, seconds, counts; and what was measured, where it was."""
    layout, machine, forecast = plan.layout, plan.machine, plan.forecast
    return {
        "gpus": layout.gpus,
        "gpu": machine.gpu.name,
        "usable_bytes": machine.usable_bytes,
        "host_bytes": plan.host_bytes,
        "parameters": plan.num_parameters,
        "layout": {
            "replicate": layout.replicate,
            "shard": layout.shard,
            "sequence": layout.sequence,
            "tensor": layout.tensor,
            "zero": layout.zero,
            "remat": list(layout.remat) or [0] * len(block_counts(plan.work.model)),
            "remat_budget": layout.budget,
            "remat_buffer_bytes": layout.buffer_bytes,
            "offload": layout.offload,
            "micro_batches": layout.micro_batches,
            "bucket_sequence": {entry.name: entry.sequence for entry in plan.entries},
        },
        "trained_parameters": plan.weights.num_trained,
        "encoder_bytes": plan.work.encoder_bytes,
        "assumed": {
            "efficiency": machine.efficiency,
            "bandwidth": machine.bandwidth,
            "network_bytes_per_second": machine.network,
            "host_bytes_per_second": machine.host,
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
        "batch_size": entry.bucket.batch_size,
        "sequence": entry.sequence,
        "slot_size": entry.slot_size,
        "samples": entry.samples,
        "bytes": entry.memory.parts() | {"total": entry.memory.total},
        "encoding_bytes": entry.encoding_bytes,
        "fits": entry.fits,
        "seconds": {
            "compute": entry.time.compute,
            "weights_wait": entry.time.weights_wait,
            "token_exchange": entry.time.token_exchange,
            "encoding": entry.time.encoding,
            "total": entry.time.seconds,
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
    """What was measured of one entry: without encoders, at the largest batch that fits."""
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


def layout_words(plan: RunPlan) -> str:
    """How the model is laid out, in one line."""
    layout, work = plan.layout, plan.work
    degrees = ("replicate", "shard", "sequence", "tensor")
    parts = [f"{name} {getattr(layout, name)}" for name in degrees if getattr(layout, name) > 1]
    if plan.degrees_differ:
        parts.append(f"{layout.sequence} / sequence micro-batches of a bucket side by side")
    lists = block_counts(work.model)
    counts = zip(layout.remat or (0,) * len(lists), lists, strict=True)
    parts += [f"zero {layout.zero}", f"remat {' + '.join(f'{n} {_short(name)}'.strip() for n, name in counts)} blocks"]
    if any(layout.remat) and layout.budget:
        kept = kept_by_lists(work.model, layout.budget, layout.tensor)
        words = "; ".join(f"{_short(name)}: {of or 'nothing'}".removeprefix(": ") for name, of in kept.items())
        parts.append(f"budget {layout.budget:g} keeps {words}")
    if layout.buffer_bytes:
        parts.append(f"inputs of recomputed blocks in {gib(layout.buffer_bytes)} of host memory")
    if layout.offload:
        parts.append("weights and optimizer in host memory")
    parts += _upkeep_words(plan)
    parts.append(f"{layout.micro_batches} micro-batch" + ("es" if layout.micro_batches > 1 else "") + " a rank a step")
    return ", ".join(parts)


def _short(blocks: str) -> str:
    """What a list of blocks is called beside the word "blocks"."""
    return blocks.removesuffix("blocks").rstrip("_")


def _upkeep_words(plan: RunPlan) -> list[str]:
    upkeep, weights = plan.layout.upkeep, plan.weights
    parts = []
    if weights.num_trained != weights.num_parameters:
        parts.append(f"{amount(weights.num_trained)} of the parameters train")
    if upkeep.master_bytes != FP32:
        parts.append("bf16 masters")
    if upkeep.moments_bytes < 2 * FP32:
        parts.append("8-bit moments")
    if upkeep.moments_offloaded:
        parts.append("moments in host memory")
    if upkeep.ema_offloaded and plan.layout.ema:
        parts.append("average in host memory")
    return parts


def stage_words(plan: RunPlan) -> str:
    """Time and price of the stage in one line."""
    forecast = plan.forecast
    mean = f"step {forecast.step_seconds:.3g} s" + (" as measured" if forecast.measured else "")
    if plan.report is None:
        mean += " (every entry of the bucket table equally often)"
    elif forecast.steps_per_pass:
        mean += f" on average, a pass {forecast.steps_per_pass:,} steps in {duration(forecast.seconds_per_pass or 0)}"
    if forecast.days is None or forecast.gpu_hours is None:
        return f"{mean}; the length of the run follows from the clip table, or from max_steps"
    return (
        f"{mean}; {forecast.steps:,} steps take {duration(forecast.days * 86400)}, {forecast.gpu_hours:,.4g} GPU-hours"
    )


def assumed_words(plan: RunPlan) -> str:
    """What the forecast takes for granted, and which option changes it."""
    machine = plan.machine
    network = f"{machine.network / 1e9:g} GB/s a GPU between nodes of {machine.gpus_per_node}"
    return (
        f"assumed, not measured: kernels reach {machine.efficiency:.0%} of {machine.gpu.peak_flops / 1e12:g} TFLOP/s "
        f"(--efficiency), transfers {machine.bandwidth:.0%} of {machine.gpu.link_bandwidth / 1e9:g} GB/s within a node "
        f"and of {network} (--bandwidth-efficiency, --network-gbs, --gpus-per-node), "
        f"{machine.headroom:.0%} of {machine.gpu.memory_gib:g} GiB stay free (--headroom); the host starts a kernel in "
        f"{machine.launch * 1e6:g} us; data loading takes no time, and micro-batches side by side are of like length "
        "(dataset.balance)"
    )


def amount(count: int) -> str:
    """`11.91 B`, `52.43 M`."""
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.2f} M"


def duration(seconds: float) -> str:
    """`45 s`, `12 min`, `3.4 h`, `5.2 days`."""
    for limit, unit, name in ((100, 1, "s"), (6000, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds / 86400:.3g} days"


_STYLE = """
:root{color-scheme:light dark;--ink:#1c2330;--soft:#5d687b;--line:#e3e7ee;--paper:#fff;--bad:#b3261e}
@media (prefers-color-scheme:dark){:root{--ink:#e6eaf2;--soft:#98a4b8;--line:#2c3443;--paper:#12161e;--bad:#ff8a80}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);margin:0 auto;max-width:82rem;
padding:2rem 1.4rem 4rem}
h1{font-size:1.6rem;margin:0 0 .4rem}h2{font-size:1.1rem;margin:2.2rem 0 .6rem}
.note{color:var(--soft);font-size:.9rem}.bad{color:var(--bad);font-weight:600}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th{color:var(--soft);font-size:.82rem}th,td{text-align:right;padding:.3rem .8rem .3rem 0;
border-bottom:1px solid var(--line);white-space:nowrap}th:first-child,td:first-child{text-align:left}
.bar{display:flex;height:1.1rem;border:1px solid var(--line);border-radius:4px;overflow:hidden;margin:.2rem 0 .7rem}
.bar i{display:block;height:100%}.key{display:inline-block;width:.8rem;height:.8rem;border-radius:2px;margin:0 .3rem 0
.9rem;vertical-align:-.05rem}pre{font:.82rem ui-monospace,Consolas,monospace;overflow-x:auto}
"""


_BUCKET_NOTE = (
    "Each at its aspect ratio of most tokens, in GiB a GPU at the worst moment of a step (gradients that come later "
    'are not in it); s and MFU of one micro-batch. "fits" is the largest batch in memory, "suggested" the largest that '
    "takes no longer than the entry of most tokens at its own."
)


def write_html(path: Path, plan: RunPlan, name: str, probed: Sequence[Probed] = ()) -> None:
    """Writes the plan of the run `name` as a page without links or scripts, whole or not at all."""
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        f"<title>Plan of {escape(name)}</title>",
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{_STYLE}</style></head><body>',
        f"<h1>Plan of {escape(name)}</h1>",
        f"<p>{escape(head_words(plan))}<br>{escape(layout_words(plan))}</p>",
        f"<p>{escape(stage_words(plan))}</p>",
        *_misfit_lines(plan),
        "<h2>Memory a GPU</h2>",
        _keys(),
        *(_bar(entry) for entry in plan.entries),
        "<h2>Buckets</h2>",
        _table(entry_head(plan), entry_rows(plan)),
        f'<p class="note">{escape(_BUCKET_NOTE)}</p>',
        *_measured(probed),
        "<h2>Clips</h2>",
        _clips(plan),
        f'<h2>Assumptions</h2><p class="note">{escape(assumed_words(plan))}.</p>',
        "</body></html>\n",
    ]
    write_whole(path, "\n".join(parts))


def _measured(probed: Sequence[Probed]) -> list[str]:
    if not probed:
        return []
    return ["<h2>Measured</h2>", _table(probe_head(), [probe_row(one) for one in probed])]


def head_words(plan: RunPlan) -> str:
    """The model and the machine in one line."""
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
    """The entries of the bucket table: their degrees where these differ, parts of their memory in GiB, activations and
    seconds of encoding where there is any, seconds of a micro-batch, batch sizes."""
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


def _misfit_lines(plan: RunPlan) -> list[str]:
    lines = [
        f'<p class="bad">{escape(entry.name)} at batch {entry.bucket.batch_size} needs {gib(entry.memory.total)}: '
        "it does not fit.</p>"
        for entry in plan.misfits
    ]
    if lines:
        changes = [f"<li>{escape(r.words)} ({escape(pace(r.slower))})</li>" for r in find_remedies(plan)]
        lines.append("<p>Changes that fit:</p><ul>" + "".join(changes) + "</ul>")
    return lines


def _keys() -> str:
    keys = (
        f'<span class="key" style="background:{colour}"></span>{escape(name)}'
        for colour, name in zip(_COLOURS, PART_NAMES.values(), strict=True)
    )
    return f'<p class="note">{"".join(keys)}</p>'


def _bar(entry: EntryPlan) -> str:
    """The parts of an entry's memory, side by side; the whole width is what may be used, or what is needed if more."""
    whole = max(entry.usable_bytes, entry.memory.total)
    pieces = "".join(
        f'<i style="width:{100 * size / whole:.2f}%;background:{colour}" title="{escape(PART_NAMES[name])}: '
        f'{gib(size)}"></i>'
        for colour, (name, size) in zip(_COLOURS, entry.memory.parts().items(), strict=True)
    )
    mark = "" if entry.fits else ' <span class="bad">does not fit</span>'
    return (
        f"<div>{escape(entry.name)}, batch {entry.bucket.batch_size}: {gib(entry.memory.total)}{mark}"
        f'<div class="bar">{pieces}</div></div>'
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{top}</tr>{body}</table></div>'


def _clips(plan: RunPlan) -> str:
    if plan.report is None:
        return f'<p class="note">The clip table could not be read ({escape(plan.no_report or "")}).</p>'
    return f"<pre>{escape(plan.report.text())}</pre>"
