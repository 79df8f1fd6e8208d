"""`longtake plan RUN --gpus 8 --gpu h200 [--key value ...]`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from longtake.cli.options import OPEN_ENDED, Run, run_and_overrides
from longtake.cli.tables import print_table
from longtake.plan import Machine, RunPlan, plan_json, plan_run, refuse_misfits, write_html
from longtake.plan.report import assumed_words, entry_head, entry_row, head_words, layout_words, stage_words
from longtake.track import gpu_named, make_console
from longtake.train import read_run


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
        found = plan_run(read_run(source, overrides).value, gpus, machine)
        if json_file is not None:
            json_file.write_text(json.dumps(plan_json(found), indent=1) + "\n", encoding="utf-8")
        if html is not None:
            write_html(html, found, source)
        _show(found)
        refuse_misfits(found)


def _show(plan: RunPlan) -> None:
    """Prints the plan: model and layout, a table of the buckets, length and price, clips, assumptions."""
    console = make_console()
    for line in (head_words(plan), layout_words(plan.layout)):
        console.print(line, markup=False)
    head = entry_head()
    print_table(console, head, [entry_row(entry) for entry in plan.entries], numbers=head[2:])
    console.print(stage_words(plan), markup=False)
    if plan.report is not None:
        console.print(plan.report.text(), markup=False)
    else:
        console.print(f"clips: not counted, for the table could not be read: {plan.no_report}", markup=False)
    console.print(assumed_words(plan), markup=False)
