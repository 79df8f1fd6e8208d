"""What verbs share: the open-ended command line `VERB RUN [--key value ...]`, and help for a group without a verb."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from longtake.api.source import found_run
from longtake.contracts import UserError

if TYPE_CHECKING:
    from longtake.data.clips.file_cache import FileCache

# Options that a verb does not know are left to the config system, which knows the keys. `--help` works anywhere.
OPEN_ENDED = {"allow_extra_args": True, "ignore_unknown_options": True}

# Settings of a group. Options that typer adds have no default, and it imports pydantic, a third of the time that
# `longtake train --help` takes, to find that the None they get instead is None.
GROUP = {"default_map": dict.fromkeys(("help", "install_completion", "show_completion"), False)}

Run = Annotated[
    str | None,
    typer.Argument(metavar="RUN", show_default=False, help="A config file, a preset's name, or a run's folder."),
]


def run_and_overrides(context: typer.Context, run: str | None, verb: str, kind: str = "train") -> tuple[str, list[str]]:
    """RUN, or the file of the preset (of this `kind`) that it names, and the overrides behind it. The file's dialect
    becomes the context's, where that has none. Raises `UserError` where RUN is missing, or a misspelt preset."""
    if run is None or run.startswith("--"):
        found = "nothing" if run is None else run
        raise UserError(f"{verb}: found {found} where RUN is expected; write `longtake {verb} RUN --key value`")
    source = found_run(run, kind)
    if context.obj is None:
        from longtake.dialects.written import written_in

        context.obj = written_in(source, context.args)
    return source, list(context.args)


def finite(value: float | None) -> float | None:
    """Return the callback of every option that is a number with a point: bounds let nan pass, and inf where there is
    none."""
    if value is not None and not abs(value) <= 1e12:
        raise typer.BadParameter(f"{value:g} is no number that can be used")
    return value


def help_without_verb(context: typer.Context) -> None:
    """The callback of a group: prints its help where no verb follows."""
    if context.invoked_subcommand is None:
        if text := context.get_help():  # with rich, typer has printed it by now
            print(text)
        raise typer.Exit


Root = Annotated[
    str | None, typer.Option(help="Folder or URL that relative paths start from; default: the table's folder.")
]
CacheFolder = Annotated[
    Path | None, typer.Option(help="Folder for files fetched from servers; default: in the user's cache folder.")
]
CacheSize = Annotated[float, typer.Option(callback=finite, help="Size of that folder, GB.")]


def file_cache(folder: Path | None, gigabytes: float) -> FileCache:
    """Return the cache of `--cache-dir` and `--cache-gb`. Raises `UserError` for a size that is none."""
    from longtake.data.clips.file_cache import FileCache, default_cache_folder

    if not 0 <= gigabytes < math.inf:
        raise UserError(f"--cache-gb {gigabytes:g}: must be a size in GB, 0 or more, such as 20")
    return FileCache(folder or default_cache_folder(), int(gigabytes * 1e9))


def read_part(words: str) -> tuple[int, int]:
    """Return the two numbers of `--part I/N`. Raises `UserError` for other words."""
    number, slash, count = words.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal()):
        raise UserError(f"--part {words}: expected I/N, the number of the part and of all parts, such as 3/16")
    if not 1 <= int(number) <= int(count):
        raise UserError(f"--part {words}: parts are counted from 1, the last one of {count} is {count}/{count}")
    return int(number), int(count)


def group(about: str) -> typer.Typer:
    """Return a group of verbs, which prints its help where no verb follows."""
    return typer.Typer(help=about, invoke_without_command=True, callback=help_without_verb, context_settings=GROUP)
