"""`longtake checkpoint ...`: what is saved, whether it is whole, and a copy to take away."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from longtake.checkpoint import inspect as inspect_tensors
from longtake.checkpoint import list_checkpoints, resolve
from longtake.checkpoint import verify as verify_files
from longtake.cli.options import help_without_verb
from longtake.cli.tables import print_table
from longtake.contracts import UserError
from longtake.system import export_model
from longtake.track import make_console

app = typer.Typer(
    help="Checkpoints: list, look in, check, export.", invoke_without_command=True, callback=help_without_verb
)

Checkpoint = Annotated[str, typer.Argument(help="A checkpoint or run folder, a glob, or `latest`.")]


@app.command("list")
def list_all(run: Annotated[Path, typer.Argument(help="The folder of a run, or of many runs.")]) -> None:
    """List the checkpoints of a run, or of every run in a folder."""
    if not run.is_dir():
        raise UserError(f"{run}: no such folder; give the folder of a run, such as outputs/demo/run")
    folders = [run, *sorted(path for path in run.iterdir() if path.is_dir())]
    found = [info for folder in folders for info in list_checkpoints(folder)]
    if not found:
        raise UserError(f"{run}: holds no checkpoint; give the folder of a run, such as outputs/demo/run")
    rows = [
        (
            str(info.path),
            str(info.epoch),
            str(info.step),
            readable_bytes(info.num_bytes),
            f"{info.when.astimezone():%Y-%m-%d %H:%M}",
            "complete" if info.complete else "incomplete",
        )
        for info in found
    ]
    head = ("checkpoint", "pass", "step", "size", "saved", "state")
    print_table(make_console(), head, rows, numbers=("pass", "step", "size"))


@app.command()
def inspect(checkpoint: Checkpoint) -> None:
    """Print the tensors of a checkpoint: names, shapes, dtypes and sizes."""
    contents = inspect_tensors(resolve(checkpoint))
    rows = [
        (row.name, str(list(row.shape)), str(row.dtype).removeprefix("torch."), readable_bytes(row.num_bytes))
        for row in contents.rows
    ]
    console = make_console()
    print_table(console, ("tensor", "shape", "dtype", "size"), rows, numbers=("size",))
    for part, total in contents.totals.items():
        line = f"{part}: {total.num_tensors} tensors, {total.num_elements:,} numbers, {readable_bytes(total.num_bytes)}"
        console.print(line, markup=False)


@app.command()
def verify(checkpoint: Checkpoint) -> None:
    """Read every file of a checkpoint and compare it with its checksum."""
    folder = resolve(checkpoint)
    faults = verify_files(folder)
    if faults:
        raise UserError(f"{folder}: damaged ({'; '.join(faults)}); use an earlier checkpoint")
    make_console().print(f"{folder}: whole", markup=False)


@app.command()
def export(
    checkpoint: Checkpoint,
    target: Annotated[Path, typer.Argument(help="The .safetensors file to write.")],
    part: Annotated[str, typer.Option(help="ema (the weights themselves where there is no average) or model.")] = "ema",
) -> None:
    """Write the weights as one .safetensors file that `longtake generate` takes by itself."""
    if target.suffix != ".safetensors":
        raise UserError(f"{target}: a name that ends in .safetensors is needed")
    if target.exists():
        raise UserError(f"{target}: exists already and is not overwritten; choose another name")
    make_console().print(str(export_model(checkpoint, target, part)), markup=False)


def readable_bytes(count: int) -> str:
    """`12.3 MB`: bytes in decimal units."""
    if count < 1000:
        return f"{count} B"
    size = float(count)
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 999.95:  # would be shown as 1000.0
            return f"{size:.1f} {unit}"
    return f"{size / 1000:.1f} TB"
