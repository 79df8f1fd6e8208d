"""The command line: one file for each verb or group of verbs, nothing but parsing and printing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NoReturn

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs a command line (default: the process's) and exits; see `longtake.cli.app.main`."""
    # OpenMP reads this when PyTorch is loaded. Left to itself it lets a thread that waits for the others spin, which
    # takes the core from whoever it waits for where cores are few: on 2 busy cores 100 steps of the demo's training
    # took 24 s with it, and over 150 s without.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from longtake.cli.app import main as run

    run(arguments)
