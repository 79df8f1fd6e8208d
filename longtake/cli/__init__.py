"""The command line: one file for each verb or group of verbs, nothing but parsing and printing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from longtake.cli.app import CommandDialect

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None, dialect: CommandDialect | None = None) -> NoReturn:
    """Runs a command line (default: the process's) and exits; see `longtake.cli.app.main`."""
    # OpenMP reads this when PyTorch is loaded. A thread that waits for the others spins for 300,000 rounds by default,
    # which takes the core from whoever it waits for where cores are few; not spinning at all costs a third of the
    # speed where they are free (2 cores, small model: 272 clips/s spinning, 276 with this bound, 180 asleep).
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    from longtake.cli.app import main as run

    run(arguments, dialect)
