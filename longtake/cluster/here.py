"""A launch on this machine: torchrun in this process, without its own report of how others ended."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterable, Sequence

from longtake.contracts import EXIT_INTERRUPTED

_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
_ENDED_BY_TORCHRUN = (-signal.SIGTERM, EXIT_INTERRUPTED)  # the others, when one has failed
Say = Callable[[str], None]


def launch_here(words: Sequence[str], processes: int | None, options: Sequence[str], grace: float, say: Say) -> int:
    """Run `words` in processes of this machine, one for each GPU by default; `options`: further ones of torchrun;
    `grace`: seconds to end in; `say`: prints a sentence.

    Returns 0, or the exit status of the process that failed first, 128 more than its number for a signal.
    """
    logging.disable(logging.CRITICAL)  # torchrun logs each of its steps when a process has failed
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    arguments = ["--standalone", "--nproc-per-node", processes or "auto", "--shutdown-timeout", round(grace)]
    program = [] if words[0].endswith(".py") else ["-m", "longtake"]
    try:
        main([str(word) for word in (*arguments, "--signals-to-handle", _SIGNALS, *options, *program, *words)])
    except SignalException:
        return EXIT_INTERRUPTED
    except ChildFailedError as error:
        failures = sorted(error.failures.items(), key=lambda item: item[1].timestamp)
        rank, code = _first((rank, failure.exitcode) for rank, failure in failures)
        if code < 0:
            say(f"rank {rank} was ended by {signal.Signals(-code).name}, and the others with it")
        return code if code > 0 else 128 - code
    return 0


def _first(ended: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Of (rank, exit code) in the order of time, the one that brought the others down."""
    return min(ended, key=lambda one: (one[1] in _ENDED_BY_TORCHRUN, one[1] < 0))
