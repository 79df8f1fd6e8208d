"""The `longtake` command: its verbs, and how a mistake ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click
import typer

from longtake import __version__
from longtake.cli import checkpoint, config, data, demo, generate, train
from longtake.contracts import UserError

EXIT_MISTAKE = 2
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="longtake",
    help="Train video diffusion transformers: a folder of clips goes in, a model that makes videos comes out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
train.register(app)
generate.register(app)
demo.register(app)
app.add_typer(data.app, name="data")
app.add_typer(config.app, name="config")
app.add_typer(checkpoint.app, name="checkpoint")


@app.callback(invoke_without_command=True)
def version(show: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    """Train video diffusion transformers."""
    if show:
        print(f"longtake {__version__}")
        raise typer.Exit


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command line and exits: 0 done, 2 a mistake (one sentence on stderr), 130 interrupted."""
    try:
        code = app(args=arguments, standalone_mode=False)
    except UserError as error:
        _complain(str(error), EXIT_MISTAKE)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        _complain("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        if error.filename is None:
            raise
        _complain(f"{error.filename}: {error.strerror}", EXIT_MISTAKE)
    sys.exit(code if isinstance(code, int) else 0)


def _complain(sentence: str, code: int) -> None:
    rank = os.environ.get("RANK", "0")
    print(f"longtake: {sentence}" if rank == "0" else f"longtake (rank {rank}): {sentence}", file=sys.stderr)
    sys.exit(code)
