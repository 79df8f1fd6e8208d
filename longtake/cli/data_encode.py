"""`longtake data encode RUN [--key value ...]`."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from longtake.cli.console import Counted
from longtake.cli.options import Run, finite, read_part, run_and_overrides
from longtake.contracts import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from longtake.encode.run import EncodeOptions, EncodeResult
    from longtake.encode.verify import VerifyResult
    from longtake.parallel.world import World
    from longtake.train.config import RunConfig

_SHOWN = 10  # sentences of a kind
_LONGEST_WAIT_SECONDS = 7 * 24 * 3600.0  # of a process for the slowest of its peers


def encode_verb(
    context: typer.Context,
    run: Run = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder of the store; default: dataset.latents, else TABLE.latents."),
    ] = None,
    part: Annotated[
        str | None, typer.Option(metavar="I/N", help="Do the I-th of N parts of the work, counted from 1.")
    ] = None,
    store_dtype: Annotated[
        Literal["bf16", "fp32"] | None, typer.Option(help="How values are kept; default: as the encoders give them.")
    ] = None,
    shard_mb: Annotated[float, typer.Option(callback=finite, min=0.001, help="Size of a shard file, MB.")] = 256,
    retry_bad: Annotated[bool, typer.Option("--retry-bad", help="Try again the clips that could not be read.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read the whole store and compare its checksums; encode nothing.")
    ] = False,
    mend: Annotated[
        bool, typer.Option("--mend", help="Read the whole store as --verify does, and make again what is damaged.")
    ] = False,
) -> int:
    """Encode RUN's clips and captions ahead of time, in all `dataset.views`, for training without the encoders.

    RUN is as for `train`. The same program runs under torchrun. After an interruption the same command continues.
    """
    from longtake.encode.auto import store_folder
    from longtake.encode.run import EncodeOptions
    from longtake.track.progress import make_console
    from longtake.train.run_file import read_run

    source, overrides = run_and_overrides(context, run, "data encode")
    config = read_run(source, overrides, dialect=context.obj).value
    folder = output or store_folder(config.dataset, config.stage_number)
    console = make_console()
    if mend and (verify or part is not None):
        other = "--verify" if verify else f"--part {part}"
        raise UserError(f"--mend {other}: one command mends the whole store; leave {other} out")
    if verify:
        return _report_verified(console, folder, _verified(config, folder, console))
    options = EncodeOptions(
        folder,
        (1, 1) if part is None else read_part(part),
        store_dtype,
        int(shard_mb * 1e6),
        config.num_workers,
        config.prefetch_factor,
        retry_bad,
    )
    _encode(config, options, console, mend)
    return 0


def _encode(config: RunConfig, options: EncodeOptions, console: Console, mend: bool) -> None:
    from longtake.encode.run import encode
    from longtake.parallel.world import start_world

    with start_world(config.device, _LONGEST_WAIT_SECONDS) as world:
        if mend:
            options = replace(options, mend=world.on_main(lambda: _find_damage(config, options, console)))

        def say(line: str) -> None:
            if world.is_main:
                console.print(line, markup=False)

        with Counted(console, "encoding", "encoded", "samples and captions", world.is_main) as shown:
            what = config.dataset, config.bucket_rule, config.stage_number
            result = encode(config, *what, options, world, shown.update, config.condition_config, say)
        _report(console, world, result)


def _verified(config: RunConfig, folder: Path, console: Console) -> VerifyResult:
    from longtake.data.tables.mix import open_clips
    from longtake.encode.verify import verify_store

    with Counted(console, "verifying", "verified", "entries") as shown:
        rules = config.sample_rules
        table = open_clips(config.dataset, rules.columns)
        return verify_store(folder, table, shown.update, rules.companion_columns)


def _find_damage(config: RunConfig, options: EncodeOptions, console: Console) -> VerifyResult:
    found = _verified(config, options.folder, console)
    for line in found.damaged[:_SHOWN]:
        console.print(line)
    again = f"to make again: {_to_make(found)}" if found.is_damaged else "nothing to mend"
    console.print(f"{options.folder}: {len(found.damaged)} damaged; {again}")
    return found


def _report(console: Console, world: World, result: EncodeResult) -> None:
    if not world.is_main:
        return
    if result.continued:
        console.print(f"{result.continued} samples and captions were encoded before")
    if result.missing:
        console.print(f"this part is done; {result.missing} shards are other parts' to make")
        return
    if result.bad:
        words = f"warning: {result.bad} of {result.num_entries} samples could not be read, listed with reasons in"
        console.print(f"{words} {result.folder / 'bad.csv'}", style="yellow")
    views = f"{result.num_views} view{'s' if result.num_views > 1 else ''}"
    console.print(
        f"{result.num_entries} samples in {views} and {result.num_texts} captions in {result.folder}\n"
        f"train with --dataset.views {result.num_views} --dataset.latents {result.folder}"
    )


def _report_verified(console: Console, folder: Path, result: VerifyResult) -> int:
    for line in (*result.damaged[:_SHOWN], *result.changed[:_SHOWN]):
        console.print(line)
    console.print(
        f"{folder}: {result.num_entries} samples ({result.bad} could not be read) and {result.num_texts} captions; "
        f"{len(result.damaged)} damaged, {len(result.changed)} clips changed since"
    )
    if result.is_damaged:
        console.print(
            f"to make again {_to_make(result)}: `longtake data encode RUN -o {shlex.quote(str(folder))} --mend` (clips "
            "whose file has changed are encoded again)"
        )
    elif not result.complete:
        again = f"longtake data encode RUN -o {shlex.quote(str(folder))}"
        console.print(f"not every shard is there yet: repeat `{again}`, or wait for its other parts")
    return 1 if result.is_damaged or result.changed or not result.complete else 0


def _to_make(found: VerifyResult) -> str:
    """What `--mend` makes again, in words."""
    count = len(found.shards)
    shards = [f"{count} shard{'s' if count > 1 else ''}"] if count else []
    return ", ".join([*shards, *(found.files or ["the index"])])
