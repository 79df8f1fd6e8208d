"""`longtake plan RUN --gpus 8 --gpu h200 [--key value ...]`."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from longtake.api.plans import default_gpus, gpus_of_folder
from longtake.cli.console import print_table
from longtake.cli.options import Run, finite, run_and_overrides
from longtake.contracts import UserError
from longtake.durable import write_whole
from longtake.plan.machine import Machine

if TYPE_CHECKING:
    from longtake.plan.logged import Logged
    from longtake.plan.probe import Probed
    from longtake.plan.run import RunPlan
    from longtake.plan.validation import ValidationForecast
    from longtake.track.devices import Gpu
    from longtake.train.config import RunConfig

_Efficiency = Annotated[
    float | None,
    typer.Option(callback=finite, min=0.01, max=1, help="Share of the peak that all kernels reach; default: by kind."),
]
_OfTransfers = Annotated[
    float, typer.Option(callback=finite, min=0.01, max=1, help="Share of the links' peaks that transfers reach.")
]
_Network = Annotated[
    float, typer.Option(callback=finite, min=0.01, help="GB/s of one GPU to other nodes, one direction.")
]
_Probed = Annotated[bool, typer.Option("--probe", help="Also measure a step of each bucket here, on random data.")]
_Measure = Annotated[
    bool, typer.Option("--measure", help="First time each kind of kernel here at the run's shapes; later plans use it.")
]
_OfNode = Annotated[int, typer.Option(min=1, help="GPUs of one machine.")]
_Html = Annotated[Path | None, typer.Option(help="Also write the plan as one HTML page.")]
_Json = Annotated[Path | None, typer.Option("--json", help="Also write the plan as data.")]
_Gpus = Annotated[int | None, typer.Option(min=1, help="GPUs of the whole job; default: a preset's own, or 8.")]
_Kind = Annotated[
    str | None, typer.Option(help="Their kind: h100, h200, a100, b200, 4090 ...; default: a preset's own, or h200.")
]
_Memory = Annotated[
    float | None, typer.Option(callback=finite, min=0.01, help="Memory of one GPU; default: the table's.")
]
_Target = Annotated[
    float | None,
    typer.Option(callback=finite, min=1e-4, help="Also print a bucket_config of the largest batches in such a step."),
]
_Peak = Annotated[
    float | None, typer.Option(callback=finite, min=0.01, help="bf16 peak of one GPU; default: the table's.")
]
_Headroom = Annotated[
    float, typer.Option(callback=finite, min=0, max=0.9, help="Share of the memory that is left free.")
]
_Interruptions = Annotated[
    float, typer.Option(callback=finite, min=1e-9, max=1e4, help="Unexpected interruptions a node and day.")
]
_Storage = Annotated[
    float,
    typer.Option("--storage-gbs", callback=finite, min=1e-6, help="GB/s of a node to where checkpoints lie."),
]
_Restart = Annotated[
    float | None,
    typer.Option(callback=finite, min=0, max=1e6, help="From an interruption to the next step; default: forecast."),
]
_Save = Annotated[
    float | None,
    typer.Option(callback=finite, min=0, max=1e6, help="A checkpoint stops the run for so long; default: forecast."),
]
_Price = Annotated[
    float | None,
    typer.Option("--price-per-gpu-hour", callback=finite, min=0, max=1e6, help="Also tell the cost, in any currency."),
]


def plan(
    context: typer.Context,
    run: Run = None,
    gpus: _Gpus = None,
    gpu: _Kind = None,
    html: _Html = None,
    json_file: _Json = None,
    efficiency: _Efficiency = None,
    bandwidth_efficiency: _OfTransfers = Machine.bandwidth,
    network_gbs: _Network = Machine.network / 1e9,
    gpus_per_node: _OfNode = Machine.gpus_per_node,
    memory_gib: _Memory = None,
    peak_tflops: _Peak = None,
    headroom: _Headroom = Machine.headroom,
    interruptions: _Interruptions = Machine.interruptions,
    storage_gbs: _Storage = Machine.storage / 1e9,
    restart_seconds: _Restart = None,
    save_seconds: _Save = None,
    price: _Price = None,
    target_step_seconds: _Target = None,
    probe: _Probed = False,
    measure: _Measure = False,
) -> None:
    """Forecast what RUN needs before it is launched: memory by part, step time, MFU, days, clips used.

    Ends with status 2 and the cheapest change where it cannot fit. --key value overrides any key of the run.
    """
    from longtake.plan.machine import CPU
    from longtake.plan.measure import device_here, words_of_here
    from longtake.plan.rates import measured_rates
    from longtake.plan.remedies import refuse_misfits
    from longtake.plan.run import plan_run
    from longtake.train.config import RunWithoutTable
    from longtake.train.run_file import read_run, words_of_stages

    source, overrides = run_and_overrides(context, run, "plan")
    own_gpus, own_gpu = default_gpus(source)
    gpus, gpu = gpus or own_gpus, gpu or (device_here() if measure else own_gpu)
    machine = Machine(
        _device(gpu, measure, memory_gib, peak_tflops),
        gpus_per_node=gpus_per_node,
        efficiency=efficiency,
        bandwidth=bandwidth_efficiency,
        network=network_gbs * 1e9,
        headroom=headroom,
        interruptions=interruptions,
        storage=storage_gbs * 1e9,
        restart=restart_seconds,
        stall=save_seconds,
    )
    machine = replace(machine, measured=measured_rates(machine.gpu.name))
    chosen = words_of_stages(source, overrides)
    if len(chosen) > 1:
        for_one = {"--html": html, "--json": json_file, "--probe": probe, "--measure": measure}
        _refuse(chosen[0][-2:], for_one | {"--target-step-seconds": target_step_seconds})
        return _show_stages(source, chosen, gpus, machine, price)
    config = read_run(source, overrides, RunWithoutTable, dialect=context.obj).value
    machine = _measured(plan_run(config, gpus, machine), config) if measure else machine
    found = plan_run(config, gpus, machine, target_step_seconds)
    probed = _probe(found, config) if probe else ()
    if probed is None:
        return  # of several processes the first speaks
    if machine.device != CPU and (line := words_of_here(found.work)) is not None:
        from longtake.track.progress import make_console

        make_console().print(line)
    found, logged = _as_it_took(source, found, probed)
    _write(found, probed, json_file, html, str(run), price)
    _show(found, probed, price, html, logged)
    if target_step_seconds is not None:  # batch sizes as written do not matter
        found = replace(found, entries=tuple(entry for entry in found.entries if not entry.largest_batch))
    refuse_misfits(found)


def _write(
    plan: RunPlan, probed: Sequence[Probed], data: Path | None, page: Path | None, run: str, price: float | None
) -> None:
    """The plan as files, where these are asked for."""
    if data is not None:
        from longtake.plan.report import plan_json

        validation = _validation(plan)
        facts = plan_json(plan, probed, None if validation is None else validation.to_json())
        write_whole(data, json.dumps(facts, indent=1) + "\n")
    if page is not None:
        from longtake.plan.page import write_html

        write_html(page, plan, run, probed, price)


def _refuse(stage: Sequence[str], options: Mapping[str, object]) -> None:
    """Raise `UserError` for options that are given, but only for one stage."""
    for option, value in options.items():
        if value:
            raise UserError(f"{option}: is for one run, and this has stages; add {shlex.join(stage)}")


def _show_stages(source: str, chosen: Sequence[list[str]], gpus: int, machine: Machine, price: float | None) -> None:
    """The plan of every stage, and what they cost together."""
    from longtake.plan.remedies import refuse_misfits
    from longtake.plan.report import total_words
    from longtake.plan.run import plan_run
    from longtake.track.progress import make_console
    from longtake.train.config import RunWithoutTable
    from longtake.train.run_file import read_run

    plans = []
    for words in chosen:
        config = read_run(source, words, RunWithoutTable).value
        plans.append(plan_run(config, gpus, machine))
        make_console().print(f"stage {words[-1]}", style="bold")
        _show(plans[-1], (), price, None)
    make_console().print(total_words(plans, price))
    for found in plans:
        refuse_misfits(found)


def _as_it_took(source: str, plan: RunPlan, probed: Sequence[Probed]) -> tuple[RunPlan, Logged | None]:
    """Return the plan with its steps as measured, by a probe or by the log in this folder, and how far off it was."""
    from longtake.plan.logged import as_logged, compare_with_probe

    if probed:
        from longtake.plan.probe import as_measured

        return as_measured(plan, probed), compare_with_probe(plan, probed)
    logged = _logged(source, plan)
    return (plan, None) if logged is None else (as_logged(plan, logged), logged)


def _logged(source: str, plan: RunPlan) -> Logged | None:
    """Return the log of the run in this folder against its plan, where that is for the GPUs that it had."""
    from longtake.plan.logged import compare_with_log
    from longtake.track.devices import GPUS
    from longtake.track.trackers import METRICS_FILE, read_lines
    from longtake.train.health.launches import read_launches

    own, metrics = gpus_of_folder(source), Path(source) / METRICS_FILE
    if own is None or not metrics.exists() or own[0] != plan.layout.gpus:
        return None
    if plan.machine.gpu.name not in (own[1], *(one.name for one in GPUS if re.search(one.pattern, own[1]))):
        return None
    firsts = [one.step + 1 for one in read_launches(Path(source))]
    return compare_with_log(plan, read_lines(metrics), firsts)


def _device(gpu: str, measures: bool, memory_gib: float | None, peak_tflops: float | None) -> Gpu:
    """Return a kind of GPU, or this machine's processor, with what the command line says otherwise."""
    from longtake.plan.measure import device_named

    device = device_named(gpu, measures)
    if memory_gib is not None:
        device = replace(device, memory_gib=memory_gib)
    return device if peak_tflops is None else replace(device, peak_flops=peak_tflops * 1e12)


def _measured(plan: RunPlan, config: RunConfig) -> Machine:
    """Return the plan's machine with the rates of this one, which are kept for later plans."""
    from longtake.parallel.world import start_world
    from longtake.plan.machine import CPU
    from longtake.plan.measure import device_here, device_named, measure_rates
    from longtake.plan.rates import keep_rates

    name = plan.machine.gpu.name
    with start_world(config.device) as world:
        if (here := device_here(world.device)) != name:
            raise UserError(f"--gpu {name}: --measure times what runs here, a {here}; choose --gpu {here}")
        found = measure_rates(plan, world, partial(typer.echo, err=True))
        rates = world.on_main(lambda: keep_rates(name, found))
    machine = replace(plan.machine, measured=rates)
    if name != CPU:
        return machine
    return replace(machine, gpu=replace(device_named(name), memory_gib=machine.gpu.memory_gib))


def _probe(plan: RunPlan, config: RunConfig) -> tuple[Probed, ...] | None:
    """What real steps on this machine say; None on all but the first process."""
    from longtake.parallel.world import start_world
    from longtake.plan.probe import ProbeStep, check_probe, probe_entries
    from longtake.train.optimizer.update import WeightUpdate

    with start_world(config.device) as world:
        check_probe(plan.layout.gpus, world)
        step = ProbeStep(plan, config, world, lambda model: WeightUpdate(model, config).at_rate_zero)
        found = probe_entries(plan, step.measure, memory_known=world.device.type == "cuda")
        return found if world.is_main else None


def _validation(plan: RunPlan) -> ValidationForecast | None:
    """What the videos of the run's validations take; None where it makes none."""
    section = plan.work.config.validation
    if section is None:
        return None

    from longtake.evaluate.validation import plan_validation
    from longtake.plan.validation import forecast_validation

    return forecast_validation(plan, plan_validation(plan.work.config, section).requests())


def _show(
    plan: RunPlan, probed: Sequence[Probed], price: float | None, page: Path | None, logged: Logged | None = None
) -> None:
    from longtake.plan import report
    from longtake.plan.failures import failure_words
    from longtake.track.progress import make_console

    console = make_console()
    for line in (report.head_words(plan), report.layout_words(plan)):
        console.print(line)
    if (ceiling := plan.work.config.ae.ceiling) is not None:
        console.print(ceiling)
    head = report.entry_head(plan)
    print_table(console, head, report.entry_rows(plan), numbers=head[2:])
    if probed:
        head = report.probe_head()
        print_table(console, head, [report.probe_row(one) for one in probed], numbers=head[2:])
    if kept := report.level_words(plan):
        console.print(kept)
    console.print(report.stage_words(plan, price))
    if logged is not None:
        from longtake.plan.logged import logged_words

        console.print(logged_words(logged))
    if (validation := _validation(plan)) is not None:
        console.print(str(validation))
    console.print(failure_words(plan))
    if plan.report is not None:
        console.print(plan.report.text())
    else:
        console.print(f"clips: not counted, for the table could not be read: {plan.no_report}")
    console.print(report.rates_words(plan.machine, plan.work.config))
    console.print(report.assumed_words(plan))
    if plan.target_seconds is not None:
        console.print(report.batches_words(plan, probed))
    if page is not None:
        console.print(f"page: {page}")
