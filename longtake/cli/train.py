"""`longtake train RUN [--key value ...]`."""

from __future__ import annotations

import typer

from longtake.cli.options import Run, run_and_overrides


def train(context: typer.Context, run: Run = None) -> int:
    """Train RUN: a config file, or the folder of an earlier run to continue. --key value overrides any key.

    --tiny shrinks the run to a size that a CPU trains in seconds. A file with stages is trained from stage to
    stage, and goes on where it stopped; --stage NAME trains one of them.

    The same program runs under torchrun: `torchrun --nproc_per_node 8 -m longtake train RUN`. Ctrl-C, SIGTERM and
    SIGUSR1 end it with a checkpoint and exit status 130; 78 says that the next stage needs another number of
    processes, and prints its command. `longtake config show RUN` lists the keys.
    """
    from longtake.train.curriculum import train_all

    return train_all(*run_and_overrides(context, run, "train"), dialect=context.obj)
