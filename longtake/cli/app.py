"""The `longtake` command: its verbs, and how a mistake ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn, Protocol

import typer

from longtake import __version__
from longtake.cli import checkpoint, config, data, demo, generate, launch, plan, train
from longtake.cli.options import help_without_verb
from longtake.config import Dialect
from longtake.contracts import UserError
from longtake.train import EXIT_INTERRUPTED

EXIT_MISTAKE = 2

# The error of a command line that cannot be parsed. Typer carries click inside from 0.25 on and needs it beside
# itself before, so the class is found by what both export.
ParseError = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")

app = typer.Typer(
    name="longtake",
    help="Train video diffusion transformers: a folder of clips goes in, a model that makes videos comes out.",
    add_completion=False,
    rich_markup_mode="markdown",
)
train.register(app)
generate.register(app)
demo.register(app)
plan.register(app)
launch.register(app)
app.add_typer(data.app, name="data")
app.add_typer(config.app, name="config")
app.add_typer(checkpoint.app, name="checkpoint")


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Train video diffusion transformers: a folder of clips goes in, a model that makes videos comes out."""
    if version:
        print(f"longtake {__version__}")
        raise typer.Exit
    help_without_verb(context)


class CommandDialect(Dialect, Protocol):
    """Another system's words, for a whole command line."""

    def command(self, words: list[str]) -> list[str]:
        """The verb, RUN and flags of Longtake; the flags' names may still be the other system's. Raises `UserError`."""
        ...


def main(arguments: Sequence[str] | None = None, dialect: CommandDialect | None = None) -> NoReturn:
    """Runs a command line (default: the process's) and exits. `dialect`: the words it is written in.

    0: done. 2: a mistake, said in one sentence on stderr. 130: interrupted. Anything unforeseen is a traceback.
    """
    command = typer.main.get_command(app)
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if "--" in words and words[0] != "launch":  # would be swallowed on the way, and hide what follows it
            raise UserError("--: a name is missing; write --key value")
        if dialect is not None:
            words = dialect.command(words)
        # Not `app()`: that ends on an interrupt by itself, and without a word.
        with command.make_context("longtake", words, obj=dialect) as context:
            code = command.invoke(context)
        sys.stdout.flush()
    except typer.Exit as done:
        code = done.exit_code
    except UserError as error:
        _complain(str(error), EXIT_MISTAKE)
    except ParseError as error:
        path = error.ctx.command_path if getattr(error, "ctx", None) else "longtake"
        _complain(f"{error.format_message()} (`{path} --help` shows what there is)", EXIT_MISTAKE)
    except (KeyboardInterrupt, typer.Abort):
        # Python started with -m ends by SIGINT, whatever code we exit with, if the interrupt came out of an `exec` of
        # text, as dataclasses and torch make while they are imported; one that ends well takes that mark away.
        exec("")
        _complain("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:  # `longtake ... | head` has what it wants
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        reason = error.strerror or str(error)
        _complain(f"{error.filename}: {reason}" if error.filename else reason, EXIT_MISTAKE)
    sys.exit(code if isinstance(code, int) else 0)


def _complain(sentence: str, code: int) -> NoReturn:
    """Prints the sentence on stderr, with the rank in front where there are several, and exits."""
    rank = os.environ.get("RANK", "0")
    print(f"longtake: {sentence}" if rank == "0" else f"longtake (rank {rank}): {sentence}", file=sys.stderr)
    sys.exit(code)
