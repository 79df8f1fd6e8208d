"""`longtake checkpoint ...`: what is saved, whether it is whole, and a copy to take away."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.table import Table

from longtake.checkpoint import inspect as inspect_tensors
from longtake.checkpoint import list_checkpoints, resolve
from longtake.checkpoint import verify as verify_files
from longtake.contracts import UserError
from longtake.system import export_model
from longtake.track import make_console

app = typer.Typer(help="Checkpoints.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Checkpoints."""


@app.command("list")
def list_all(run: Path = typer.Argument(..., help="The folder of a run, or of many runs.")) -> None:
    """List the checkpoints of a run, or of every run in a folder."""
    if not run.is_dir():
        raise UserError(f"{run}: no such folder; give the folder of a run, such as outputs/demo/run")
    folders = [run, *sorted(path for path in run.iterdir() if path.is_dir())]
    found = [info for folder in folders for info in list_checkpoints(folder)]
    if not found:
        raise UserError(f"{run}: holds no checkpoint; give the folder of a run, such as outputs/demo/run")
    table = Table("checkpoint", "pass", "step", "size", "saved", "state", box=None, header_style="bold")
    for info in found:
        state = "complete" if info.complete else "[red]incomplete[/]"
        when = f"{info.when:%Y-%m-%d %H:%M}"
        table.add_row(str(info.path), str(info.epoch), str(info.step), readable_bytes(info.num_bytes), when, state)
    make_console().print(table)


@app.command()
def inspect(checkpoint: str = typer.Argument(..., help="A checkpoint or run folder, a glob, or `latest`.")) -> None:
    """Print the tensors of a checkpoint: names, shapes, dtypes and sizes."""
    contents = inspect_tensors(resolve(checkpoint))
    table = Table("tensor", "shape", "dtype", "size", box=None, header_style="bold")
    for row in contents.rows:
        table.add_row(row.name, str(list(row.shape)), str(row.dtype).removeprefix("torch."), readable_bytes(row.num_bytes))
    out = make_console()
    out.print(table)
    for part, total in contents.totals.items():
        out.print(f"{part}: {total.num_tensors} tensors, {readable_bytes(total.num_bytes)}", highlight=False)


@app.command()
def verify(checkpoint: str = typer.Argument(..., help="A checkpoint or run folder, a glob, or `latest`.")) -> None:
    """Read every file of a checkpoint and compare it with its checksum."""
    folder = resolve(checkpoint)
    faults = verify_files(folder)
    if faults:
        raise UserError(f"{folder}: damaged ({'; '.join(faults)}); use an earlier checkpoint")
    make_console().print(f"{folder}: whole", highlight=False)


@app.command()
def export(
    checkpoint: str = typer.Argument(..., help="A checkpoint or run folder, a glob, or `latest`."),
    target: Path = typer.Argument(..., help="The .safetensors file to write."),
    part: str = typer.Option("ema", help="ema (the weights themselves where there is no average) or model"),
) -> None:
    """Write the weights as one .safetensors file that `longtake generate` takes by itself."""
    if target.suffix != ".safetensors":
        raise UserError(f"{target}: a name that ends in .safetensors is needed")
    make_console().print(f"{export_model(checkpoint, target, part)}", highlight=False)


def readable_bytes(count: int) -> str:
    """`12.3 MB`: bytes in decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
