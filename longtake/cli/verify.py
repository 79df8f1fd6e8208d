"""`longtake verify PRESET [--key value ...]`."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from longtake.cli.console import print_table
from longtake.cli.options import Run, run_and_overrides
from longtake.durable import write_whole

if TYPE_CHECKING:
    from longtake.verification.report import PartResult, TrainingResult

_FILE = Path("verified.json")


def verify(
    context: typer.Context,
    run: Run = None,
    steps: Annotated[int, typer.Option(min=0, max=10_000, help="Training steps; 0: none.")] = 50,
    json_file: Annotated[Path, typer.Option("--json", help="The record, which may be attached to an issue.")] = _FILE,
) -> int:
    """Verify released weights on this machine: against diffusers and transformers, in training, against the plan.

    RUN: a preset, or a run file that names weights, which are downloaded where they are missing. Works on one device.
    The record holds no paths or names of yours. Ends with status 1 where a part fails. --key value overrides any key.
    """
    from longtake.track.progress import make_console
    from longtake.verification.run import verify as verify_weights

    source, overrides = run_and_overrides(context, run, "verify")
    console = make_console()
    live = console.is_terminal
    with console.status("reading the run") if live else nullcontext() as status:
        record = verify_weights(
            source,
            overrides,
            steps=steps,
            dialect=context.obj,
            report=lambda name: status.update(f"checking: {name}") if live else None,
        )
    write_whole(json_file, record.to_json())
    head = ("part", "reference", "outputs differ", "gradients differ", "verdict")
    print_table(console, head, [*map(_part_row, record.parts)])
    console.print(_training_line(record.training), markup=False)
    for problem in [*record.problems, *map(_unseen_line, record.unseen)]:
        console.print(problem, markup=False)
    console.print(f"record: {json_file}", markup=False)
    return 1 if record.problems else 0


def _part_row(part: PartResult) -> tuple[str, ...]:
    errors = ["-" if error is None else f"{error:.1e}" for error in (part.output_error, part.gradient_error)]
    return part.name, part.reference, *errors, "ok" if part.problem is None else "failed"


def _unseen_line(name: str) -> str:
    return (
        f"{name}: no library has this model, so its numbers were compared with nothing; names and shapes of tensors "
        "are right, and results and gradients are finite"
    )


def _training_line(training: TrainingResult) -> str:
    if training.first_loss is None:
        return f"training: {training.steps} steps"
    line = f"training: {training.steps} steps of {training.bucket}, loss {training.first_loss:.4g} at first, "
    line += f"{training.last_loss:.4g} at the end, {training.step_seconds:.3g} s a step"
    if training.forecast_seconds is not None:
        line += f" (forecast {training.forecast_seconds:.3g} s)"
    if training.peak_bytes is not None:
        line += f", {training.peak_bytes / 2**30:.1f} GiB"
        if training.forecast_bytes is not None:
            line += f" (forecast {training.forecast_bytes / 2**30:.1f} GiB)"
    return line
