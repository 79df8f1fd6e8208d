"""`longtake plan RUN --gpus 8 --gpu h200 [--key value ...]`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from longtake.cli.options import OPEN_ENDED, Run, run_and_overrides
from longtake.cli.tables import print_table
from longtake.durable import write_whole
from longtake.parallel import start_world
from longtake.plan import (
    Machine,
    Probed,
    ProbeStep,
    RunPlan,
    check_probe,
    plan_json,
    plan_run,
    probe_entries,
    refuse_misfits,
    write_html,
)
from longtake.plan.report import (
    assumed_words,
    entry_head,
    entry_rows,
    head_words,
    layout_words,
    probe_head,
    probe_row,
    stage_words,
)
from longtake.track import gpu_named, make_console
from longtake.train import RunConfig, read_run
from longtake.train.trial import make_update


def register(app: typer.Typer) -> None:
    """Adds the verb to the command."""

    @app.command(context_settings=OPEN_ENDED)
    def plan(
        context: typer.Context,
        run: Run = None,
        gpus: Annotated[int, typer.Option(min=1, help="GPUs of the whole job.")] = 8,
        gpu: Annotated[str, typer.Option(help="Their kind: h100, h200, a100, b200, 4090, l40s ...")] = "h200",
        html: Annotated[Path | None, typer.Option(help="Also write the plan as one HTML page.")] = None,
        json_file: Annotated[Path | None, typer.Option("--json", help="Also write the plan as data.")] = None,
        efficiency: Annotated[
            float, typer.Option(min=0.01, max=1, help="Share of the peak that the kernels are taken to reach.")
        ] = Machine.efficiency,
        bandwidth_efficiency: Annotated[
            float, typer.Option(min=0.01, max=1, help="The same for transfers.")
        ] = Machine.bandwidth,
        network_gbs: Annotated[
            float, typer.Option(min=0.01, help="GB/s of one GPU to other nodes, one direction.")
        ] = Machine.network / 1e9,
        gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs of one machine.")] = Machine.gpus_per_node,
        memory_gib: Annotated[
            float | None, typer.Option(min=0.01, help="Memory of one GPU; default: the table's.")
        ] = None,
        peak_tflops: Annotated[
            float | None, typer.Option(min=0.01, help="bf16 peak of one GPU; default: the table's.")
        ] = None,
        headroom: Annotated[
            float, typer.Option(min=0, max=0.9, help="Share of the memory that is left free.")
        ] = Machine.headroom,
        probe: Annotated[
            bool,
            typer.Option("--probe", help="Also measure a step of each bucket here, on random data."),
        ] = False,
    ) -> None:
        """Say what RUN needs before anything is launched: memory by part, step time, MFU, days, clips kept.

        Ends with status 2 and the cheapest change where it cannot fit. --key value overrides any key of the run.
        """
        source, overrides = run_and_overrides(context, run, "plan")
        device = gpu_named(gpu)
        if memory_gib is not None:
            device = replace(device, memory_gib=memory_gib)
        if peak_tflops is not None:
            device = replace(device, peak_flops=peak_tflops * 1e12)
        machine = Machine(
            device,
            gpus_per_node=gpus_per_node,
            efficiency=efficiency,
            bandwidth=bandwidth_efficiency,
            network=network_gbs * 1e9,
            headroom=headroom,
        )
        config = read_run(source, overrides).value
        found = plan_run(config, gpus, machine)
        probed = _probe(found, config) if probe else ()
        if probed is None:
            return  # of several processes the first speaks
        if json_file is not None:
            write_whole(json_file, json.dumps(plan_json(found, probed), indent=1) + "\n")
        if html is not None:
            write_html(html, found, source, probed)
        _show(found, probed)
        refuse_misfits(found)


def _probe(plan: RunPlan, config: RunConfig) -> tuple[Probed, ...] | None:
    """What real steps on this machine say; None on all but the first process."""
    with start_world(config.device) as world:
        check_probe(plan.layout.gpus, world)
        step = ProbeStep(plan, config, world, lambda denoiser: make_update(denoiser, config))
        found = probe_entries(plan, step.measure, memory_told=world.device.type == "cuda")
        return found if world.is_main else None


def _show(plan: RunPlan, probed: Sequence[Probed]) -> None:
    """Prints the plan: model and layout, a table of the buckets, length and price, clips, assumptions."""
    console = make_console()
    for line in (head_words(plan), layout_words(plan)):
        console.print(line, markup=False)
    head = entry_head(plan)
    print_table(console, head, entry_rows(plan), numbers=head[2:])
    if probed:
        print_table(console, probe_head(), [probe_row(one) for one in probed], numbers=probe_head()[2:])
    console.print(stage_words(plan), markup=False)
    if plan.report is not None:
        console.print(plan.report.text(), markup=False)
    else:
        console.print(f"clips: not counted, for the table could not be read: {plan.no_report}", markup=False)
    console.print(assumed_words(plan), markup=False)
