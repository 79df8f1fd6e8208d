"""`longtake train RUN [--key value ...]`."""

from __future__ import annotations

import typer

from longtake.cli.options import OPEN_ENDED, Run, run_and_overrides
from longtake.train import EXIT_INTERRUPTED, train_run


def register(app: typer.Typer) -> None:
    """Adds the verb to the command."""

    @app.command(context_settings=OPEN_ENDED)
    def train(context: typer.Context, run: Run = None) -> int:
        """Train RUN: a config file, or the folder of an earlier run to continue. --key value overrides any key.

        The same program runs under torchrun: `torchrun --nproc_per_node 8 -m longtake train RUN`. Ctrl-C, SIGTERM and
        SIGUSR1 end it with a checkpoint and exit status 130. `longtake config show RUN` lists the keys.
        """
        outcome = train_run(*run_and_overrides(context, run, "train"))
        return EXIT_INTERRUPTED if outcome.stopped else 0
