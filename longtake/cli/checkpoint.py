"""`longtake checkpoint ...`: what is saved, whether it is whole, and a copy to take away."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, get_args

import typer

from longtake.checkpoint import EXPORT_BYTES, hold, list_checkpoints, resolve
from longtake.checkpoint import inspect as inspect_tensors
from longtake.checkpoint import verify as verify_files
from longtake.cli.options import help_without_verb
from longtake.cli.tables import print_table
from longtake.contracts import UserError
from longtake.system import export_adapters, export_merged, export_model
from longtake.track import make_console
from longtake.weights import Family

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
    with hold(checkpoint) as folder:
        faults = verify_files(folder)
    if faults:
        raise UserError(f"{folder}: damaged ({'; '.join(faults)}); use an earlier checkpoint")
    make_console().print(f"{folder}: whole", markup=False)


@app.command()
def export(
    checkpoint: Checkpoint,
    target: Annotated[Path, typer.Argument(help="The .safetensors file, or the folder (no ending), to write.")],
    part: Annotated[str, typer.Option(help="ema (the weights themselves where there is no average) or model.")] = "ema",
    max_file_gb: Annotated[float, typer.Option(help="Size of a file in a folder, GB.")] = EXPORT_BYTES / 1e9,
    lora: Annotated[
        str | None, typer.Option(help="Adapters alone, as peft (a folder), diffusers or comfy has them.")
    ] = None,
    merge: Annotated[bool, typer.Option(help="Whole weights, adapters and what did not train in them.")] = False,
) -> None:
    """Write the weights as one .safetensors file, or a folder of them in Hugging Face's layout.

    `longtake generate` takes either by itself. The run may go on meanwhile.
    """
    if target.suffix not in ("", ".safetensors"):
        raise UserError(f"{target}: a name that ends in .safetensors is needed, or one without an ending for a folder")
    if max_file_gb <= 0:
        raise UserError(f"--max-file-gb {max_file_gb:g}: choose more than 0, such as 5")
    if target.exists():
        raise UserError(f"{target}: exists already and is not overwritten; choose another name")
    if lora is not None and merge:
        raise UserError("--lora, --merge: one writes adapters alone, the other whole weights; keep one of the two")
    if lora is not None:
        written = export_adapters(checkpoint, target, _family(lora, target), part)
    else:
        write = export_merged if merge else export_model
        written = write(checkpoint, target, part, int(max_file_gb * 1e9))
    make_console().print(str(written), markup=False)


def _family(name: str, target: Path) -> Family:
    """Whose adapter files are meant, where `target` is such a place as they take."""
    if name not in get_args(Family):
        raise UserError(f"--lora {name}: choose one of {', '.join(get_args(Family))}")
    if (name == "peft") == (target.suffix == ".safetensors"):
        wanted = "a folder, without an ending" if name == "peft" else "a file, with the ending .safetensors"
        raise UserError(f"{target}: adapters of {name} are {wanted}")
    return name  # type: ignore[return-value]


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
