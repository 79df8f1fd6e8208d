"""`longtake checkpoint ...`: what is saved, whether it is whole, and a copy to take away."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.filesize import decimal

from longtake.cli.console import print_table
from longtake.cli.options import OPEN_ENDED, finite, group
from longtake.contracts import UserError

app = group("Checkpoints: list, look in, check, export, convert.")

Checkpoint = Annotated[str, typer.Argument(help="A checkpoint or run folder, a glob, or `latest`.")]


@app.command("list")
def list_all(
    run: Annotated[Path, typer.Argument(help="The folder of a run, or of many runs.")],
    verify: Annotated[bool, typer.Option(help="Read every byte of them; else sizes and heads of files.")] = False,
) -> None:
    """List the checkpoints of a run, or of every run in a folder, and whether they are whole."""
    from longtake.checkpoint.folder import glance
    from longtake.checkpoint.folder import verify as verify_files
    from longtake.checkpoint.runs import list_checkpoints
    from longtake.track.progress import make_console

    if not run.is_dir():
        raise UserError(f"{run}: no such folder; give the folder of a run, such as outputs/demo/run")
    folders = [run, *sorted(path for path in run.iterdir() if path.is_dir())]
    found = [info for folder in folders for info in list_checkpoints(folder)]
    if not found:
        raise UserError(f"{run}: holds no checkpoint; give the folder of a run, such as outputs/demo/run")
    check = verify_files if verify else glance
    rows = [
        (
            str(info.path),
            str(info.epoch),
            str(info.step),
            decimal(info.num_bytes),
            f"{info.when.astimezone():%Y-%m-%d %H:%M}",
            f"damaged: {faults[0]}" if (faults := check(info.path)) else "complete",
        )
        for info in found
    ]
    head = ("checkpoint", "pass", "step", "size", "saved", "state")
    print_table(make_console(), head, rows, numbers=("pass", "step", "size"))


@app.command()
def inspect(checkpoint: Checkpoint) -> None:
    """Print the tensors of a checkpoint: names, shapes, dtypes and sizes."""
    from longtake.checkpoint.contents import inspect as inspect_contents
    from longtake.checkpoint.runs import resolve
    from longtake.track.progress import make_console

    contents = inspect_contents(resolve(checkpoint))
    rows = [
        (row.name, str(list(row.shape)), str(row.dtype).removeprefix("torch."), decimal(row.num_bytes))
        for row in contents.rows
    ]
    console = make_console()
    print_table(console, ("tensor", "shape", "dtype", "size"), rows, numbers=("size",))
    for part, total in contents.totals.items():
        line = f"{part}: {total.num_tensors} tensors, {total.num_elements:,} numbers, {decimal(total.num_bytes)}"
        console.print(line)


@app.command()
def verify(checkpoint: Checkpoint) -> None:
    """Read every file of a checkpoint and compare it with its checksum."""
    from longtake.checkpoint.folder import verify as verify_files
    from longtake.checkpoint.runs import hold
    from longtake.track.progress import make_console

    with hold(checkpoint) as folder:
        faults = verify_files(folder)
    if faults:
        raise UserError(f"{folder}: damaged ({'; '.join(faults)}); use an earlier checkpoint")
    make_console().print(f"{folder}: whole")


@app.command()
def export(
    checkpoint: Checkpoint,
    target: Annotated[Path, typer.Argument(help="The .safetensors file, or the folder (no ending), to write.")],
    part: Annotated[str, typer.Option(help="ema (the weights themselves where there is no average) or model.")] = "ema",
    max_file_gb: Annotated[
        float,
        typer.Option(callback=finite, help="Size of a file in a folder, GB; 5 is what Hugging Face's libraries write."),
    ] = 5.0,
    lora: Annotated[
        str | None, typer.Option(help="Adapters alone, as peft (a folder), diffusers or comfy has them.")
    ] = None,
    merge: Annotated[bool, typer.Option(help="Whole weights, adapters and what did not train in them.")] = False,
    folder_of: Annotated[
        str | None, typer.Option("--as", help="The same as a folder of another library, such as diffusers.")
    ] = None,
    low_noise: Annotated[
        bool, typer.Option("--low-noise", help="Of two denoisers the second one, for low noise.")
    ] = False,
) -> None:
    """Write the weights as one .safetensors file, or a folder of them in Hugging Face's layout.

    `longtake generate` takes either by itself. The run may go on meanwhile.
    """
    from longtake.checkpoint.folder import LOW_NOISE
    from longtake.system.export import export_adapters, export_folder, export_merged, export_model
    from longtake.track.progress import make_console

    if target.suffix not in ("", ".safetensors"):
        raise UserError(f"{target}: a name that ends in .safetensors is needed, or one without an ending for a folder")
    if max_file_gb <= 0:
        raise UserError(f"--max-file-gb {max_file_gb:g}: choose more than 0, such as 5")
    if target.exists():
        raise UserError(f"{target}: exists already and is not overwritten; choose another name")
    if lora is not None and (merge or folder_of is not None):
        other = "--merge" if merge else "--as"
        raise UserError(f"--lora, {other}: one writes adapters alone, the other whole weights; keep one of the two")
    if folder_of is not None and target.suffix:
        raise UserError(f"{target}: --as writes a folder; give a name without an ending")
    prefix = LOW_NOISE if low_noise else ""
    if lora is not None:
        written = export_adapters(checkpoint, target, lora, part, prefix)
    elif folder_of is not None:
        written = export_folder(checkpoint, target, folder_of, part, int(max_file_gb * 1e9), prefix)
    else:
        write = export_merged if merge else export_model
        written = write(checkpoint, target, part, int(max_file_gb * 1e9), prefix)
    make_console().print(str(written))


@app.command(context_settings=OPEN_ENDED)
def convert(
    context: typer.Context,
    source: Annotated[str, typer.Argument(help="A file or folder of weights, or owner/name on the Hugging Face hub.")],
    target: Annotated[Path, typer.Argument(help="The .safetensors file, or the folder (no ending), to write.")],
    folder_of: Annotated[
        str | None, typer.Option("--as", help="A folder of PyTorch's distributed checkpoint, by names of this program.")
    ] = None,
) -> None:
    """Write published weights as Longtake's own file or folder, for a model that may be larger than they are.

    --key value says what the model is, where the source does not; what the source lacks starts as in a run.
    """
    from longtake.system.convert import convert_weights
    from longtake.track.progress import make_console

    for line in convert_weights(source, target, context.args, names=folder_of):
        make_console().print(line, markup=False, soft_wrap=True)
    make_console().print(str(target), markup=False, soft_wrap=True)
