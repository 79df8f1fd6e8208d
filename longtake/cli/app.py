"""The `longtake` command: its verbs, and how a mistake ends."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from longtake import __version__
from longtake.cli import (
    checkpoint,
    config,
    data,
    demo,
    doctor,
    generate,
    health,
    launch,
    nodes,
    now,
    plan,
    preset,
    report,
    train,
    ui,
    verify,
    watch,
)
from longtake.cli.console import EXIT_MISTAKE, complain
from longtake.cli.options import GROUP, OPEN_ENDED, help_without_verb
from longtake.contracts import UserError, WeightsMisfit

if TYPE_CHECKING:
    from longtake.config.load import Dialect

    class CommandDialect(Dialect):
        """Another system's words, for a whole command line."""

        typed_names: Mapping[str, str]  # Longtake's key -> the name that the user typed for it

        def command(self, words: list[str]) -> list[str]:
            """Return the verb, RUN and flags of Longtake, these perhaps by the other system's names. Raises
            `UserError`."""
            ...


NAME = "longtake"
ON_WINDOWS = ("plan", "config")  # verbs that work without Linux
COMPLETE = "_LONGTAKE_COMPLETE"  # set by the script that --install-completion has given the shell

# The error of a command line that cannot be parsed. Typer carries click inside from 0.25 on and needs it beside
# itself before, so the class is found by what both export.
ParseError = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")

app = typer.Typer(
    name=NAME,
    help="Train video diffusion transformers: a folder of clips goes in, a model that makes videos comes out.",
    rich_markup_mode="markdown",
    context_settings=GROUP,
)
for verb in (train.train, generate.generate, demo.demo, plan.plan, doctor.doctor, verify.verify):
    app.command(context_settings=OPEN_ENDED)(verb)
app.command()(launch.launch)
for verb in (nodes.nodes, nodes.stop, health.health):
    app.command()(verb)
app.command(launch.SLURM, hidden=True)(launch.launch_on_slurm)
app.command()(report.report)
app.command()(now.now)
app.command()(ui.ui)
app.command("watch", context_settings=OPEN_ENDED)(watch.watch_runs)
for name, group in {"preset": preset, "data": data, "config": config, "checkpoint": checkpoint}.items():
    app.add_typer(group.app, name=name)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Train video diffusion transformers: a folder of clips goes in, a model that makes videos comes out."""
    if version:
        print(f"{NAME} {__version__}")
        raise typer.Exit
    help_without_verb(context)


def run(arguments: Sequence[str], dialect: CommandDialect | None = None) -> int:
    """Run a command line and return the exit status. A user's mistake has been printed; what else goes wrong is
    raised, and so is an interrupt."""
    words = list(arguments)
    command = typer.main.get_command(app)
    if COMPLETE in os.environ:  # the shell asks how a word may go on; answers and exits
        command.main(prog_name=NAME)
    try:
        if "--" in words and words[0] != "launch":  # would be swallowed on the way, and hide what follows it
            raise UserError("--: a name is missing; write --key value")
        if dialect is not None:
            words = dialect.command(words)
        words = launch.with_verb(words)
        if is_windows():
            refuse_on_windows(words)
        # Not `app()`: that ends on an interrupt by itself, and without a word.
        with command.make_context(NAME, words, obj=dialect) as context:
            code = command.invoke(context)
        sys.stdout.flush()
    except typer.Exit as done:
        code = done.exit_code
    except UserError as error:
        tiny = isinstance(error, WeightsMisfit) and "--tiny" in words
        message = f"{error}; --tiny has made the model small: leave it out, or the weights" if tiny else str(error)
        if dialect is not None:
            from longtake.dialects.names import restate

            message = restate(message, dialect.typed_names)
        complain(message)
        code = EXIT_MISTAKE
    except ParseError as error:
        path = error.ctx.command_path if getattr(error, "ctx", None) else NAME
        said = error.format_message().replace(": Value error, ", ": ")  # some versions of Typer put it there
        complain(f"{said} (`{path} --help` shows what there is)")
        code = EXIT_MISTAKE
    except typer.Abort:
        raise KeyboardInterrupt from None
    except BrokenPipeError:  # `longtake ... | head` has what it wants
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except OSError as error:
        complain(_sentence(error))
        code = EXIT_MISTAKE
    return code if isinstance(code, int) else 0


def is_windows() -> bool:
    """Return True on Windows itself; WSL2 is Linux."""
    return sys.platform == "win32"


def refuse_on_windows(words: Sequence[str]) -> None:
    """Raise `UserError` for a verb that needs Linux: file locks, signals and forked processes."""
    verb = words[0] if words else "--help"
    if verb in ON_WINDOWS or verb.startswith("-") or "--help" in words:
        return
    raise UserError(
        f"longtake {verb}: runs on Linux, found Windows; start it inside WSL2 (`wsl --install` in PowerShell), "
        f"where all of Longtake works; natively {', '.join(ON_WINDOWS)} and --help do"
    )


def _sentence(error: OSError) -> str:
    """What the system refused, and where; a file in the place of a folder, and the other way round, in whole words."""
    reason, name = error.strerror or str(error), error.filename
    if not isinstance(name, (str, os.PathLike)) or not name:
        return reason
    if isinstance(error, IsADirectoryError):
        return f"{name}: is a folder, and a file is wanted there; give another name"
    if isinstance(error, (NotADirectoryError, FileExistsError)):
        path = Path(os.fspath(name))
        if (file := next((one for one in (path, *path.parents) if one.is_file()), None)) is not None:
            return f"{file}: is a file, and a folder is wanted there; give another name, or move the file away"
    if isinstance(error, PermissionError):
        return f"{name}: {reason}; change its permissions, or give another path"
    if error.errno == errno.EROFS:
        return f"{name}: {reason}; give a path on another disk"
    return f"{name}: {reason}"
