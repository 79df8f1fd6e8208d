"""The command line: one file for each verb or group of verbs, nothing but parsing and printing.

A verb's module imports no more than parsing needs; packages are named whole (`train.train_all`), so that their modules
are imported when the verb runs.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple, NoReturn

if TYPE_CHECKING:
    from longtake.cli.app import CommandDialect

# Windows has no SIGUSR1.
_ENDING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))


def main(arguments: Sequence[str] | None = None, dialect: CommandDialect | None = None) -> NoReturn:
    """Run a command line (default: the process's) and exit. `dialect`: the words it is written in.

    0: done. 2: a mistake, said in one sentence on stderr. 130: interrupted. Anything unforeseen is a traceback.
    """
    # OpenMP reads this when PyTorch is loaded. A thread that waits for the others spins for 300,000 rounds by default,
    # which takes the core from whoever it waits for where cores are few; not spinning at all costs a third of the
    # speed where they are free (2 cores, small model: 272 clips/s spinning, 276 with this bound, 180 asleep).
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    atexit.register(_ignore_signals)  # first, so that it is called last
    try:  # around the imports too, which take seconds where a verb needs PyTorch
        with interrupts_noted() as pressed:
            from longtake.cli.app import run

            code = run(sys.argv[1:] if arguments is None else arguments, dialect)
    except (KeyboardInterrupt, Exception) as error:
        # A library that is interrupted while it is imported may swallow that, and fail for what it misses.
        if not isinstance(error, KeyboardInterrupt) and not (pressed and time.monotonic() - pressed[-1].time < 10):
            raise
        from longtake.cli.console import complain
        from longtake.contracts import EXIT_INTERRUPTED

        # Python started with -m ends by SIGINT, whatever code we exit with, if the interrupt came out of an `exec` of
        # text, as dataclasses and torch make while they are imported; one that ends well takes that mark away.
        exec("")
        if not (pressed and pressed[-1].number == signal.SIGTERM and "TORCHELASTIC_RUN_ID" in os.environ):
            complain("interrupted", to_torchrun=False)  # where torchrun ends this process, another has said why
        code = EXIT_INTERRUPTED
    atexit.register(_leave_by_signals, code)  # last, so that it is called first
    sys.exit(code)


def _leave_by_signals(code: int) -> None:
    """For the time that libraries take for their own ends: the work is done, and who is in a hurry gets its status."""
    if threading.current_thread() is threading.main_thread():
        for number in _ENDING:
            signal.signal(number, lambda *_: os._exit(code))


def _ignore_signals() -> None:
    """For the tenths of a second in which Python takes PyTorch apart: the work is done, and its status is to hold."""
    if threading.current_thread() is threading.main_thread():
        for number in _ENDING:
            signal.signal(number, signal.SIG_IGN)


class Interrupt(NamedTuple):
    number: int  # of the signal
    time: float  # monotonic seconds


@contextmanager
def interrupts_noted() -> Iterator[list[Interrupt]]:
    """Inside, SIGTERM and SIGUSR1 raise KeyboardInterrupt as Ctrl-C does, and what comes is added to the list."""
    pressed: list[Interrupt] = []

    def note(number: int, frame: FrameType | None) -> None:
        pressed.append(Interrupt(number, time.monotonic()))
        raise KeyboardInterrupt

    usual = dict.fromkeys(_ENDING, signal.SIG_DFL) | {signal.SIGINT: signal.default_int_handler}
    if threading.current_thread() is not threading.main_thread():
        usual = {}
    own = {number: handler for number, handler in usual.items() if signal.getsignal(number) is handler}
    for number in own:
        signal.signal(number, note)
    try:
        yield pressed
    finally:
        for number, handler in own.items():
            signal.signal(number, handler)
