"""`python -m tests.benchmarks.program NAME ...`: a benchmark in which the interpreters that it starts are forks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.forks import Forked
from tests.train.runs import kill

FOLDER = Path(__file__).parents[2] / "benchmarks"
_POPEN = subprocess.Popen


def start(words: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Takes the place of `subprocess.Popen`."""
    if words[0] != sys.executable or words[1] == "-P":  # the writer of checkpoints is an interpreter without imports
        return _POPEN(words, **options)
    return Forked(["tests.torchrun" if word == "torch.distributed.run" else word for word in words], **options)


if __name__ == "__main__":
    subprocess.Popen = start
    sys.path.insert(0, str(FOLDER))
    del sys.argv[0]
    program = import_module(sys.argv[0])
    program._kill = kill  # which knows whose a fork is
    program.main()
