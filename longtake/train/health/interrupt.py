"""Stopping well: a signal ends a run after the current step, and a run that never starts gives up; and what else is
asked of a run that trains, by files in its folder."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

from longtake.processes import ENDING_SIGNALS, leave_at_once, taken_signals
from longtake.small_files import parse_json, read_small

EXIT_NO_FIRST_STEP = 75  # no step within `first_step_timeout`
REQUESTS = {"sample": 1, "save": 2, "stop": 4}  # bits of what may be asked of a run by `longtake now`
_REQUEST_UNIT = 1 << 20  # of these bits in the number that ranks add up: above any count of ranks
_LOOK_SECONDS = 1.0  # between two looks for such files
_LOG = logging.getLogger(__name__)


def ended_by_signals() -> AbstractContextManager[None]:
    """Make SIGTERM and SIGUSR1 end the process, inside the context, as Ctrl-C does, by KeyboardInterrupt: a run that
    still loads leaves nothing behind and ends with its own code. `StopRequest` takes over once there are steps."""
    return taken_signals(ENDING_SIGNALS[1:], lambda number: signal.default_int_handler(number, None), once=False)


@contextmanager
def held_signals() -> Iterator[None]:
    """Hold the first signal that would end the process until the end of the body: what the body makes is owned by the
    caller, who can undo it. A second one of the same acts at once."""
    held: list[int] = []
    with taken_signals(ENDING_SIGNALS, held.append):
        yield
    if held:
        signal.raise_signal(held[0])


class StopRequest(ExitStack):
    """Turns the first SIGINT, SIGTERM or SIGUSR1 (a scheduler's warning) into a request that the loop reads; a second
    one of the same acts as usual. So does the end of `seconds`, where there is one.

    The request travels in the step's reduction, so all ranks stop after the same step; so do requests by files in
    `folder` that are for launch number `launch`, which rank 0 looks for and removes.
    """

    def __init__(
        self, announce: bool = True, seconds: float | None = None, folder: Path | None = None, launch: int = 0
    ) -> None:
        super().__init__()
        self.folder, self._looked = folder, 0.0
        self.launch = launch
        self.asked = False
        self.announce = announce  # rank 0 alone speaks
        self.seconds = seconds

    def __enter__(self) -> StopRequest:
        self.enter_context(taken_signals(ENDING_SIGNALS, self._ask))
        if self.seconds is not None:
            timer = threading.Timer(max(0.0, self.seconds), self._ask_in_time)
            timer.daemon = True
            timer.start()
            self.callback(timer.cancel)
        return self

    def flags(self, failed: bool = False) -> int:
        """Return this rank's flags for a step's reduction; `failed`: it must stop for another reason."""
        found = 0
        if self.announce and self.folder is not None and time.monotonic() - self._looked > _LOOK_SECONDS:
            self._looked = time.monotonic()
            found = sum(bit for name, bit in REQUESTS.items() if self._take(self.folder, name))
        if found & REQUESTS["stop"]:
            self._stop(b"`longtake now stop`: stopping after this step with a checkpoint")
        return found * _REQUEST_UNIT + (self.asked or failed)

    def _take(self, folder: Path, name: str) -> bool:
        """Remove a request from the run's folder; return True if it is for this launch."""
        path = request_file(folder, name)
        try:
            text = read_small(path)
            path.unlink()
        except (OSError, ValueError):  # mostly: there is none
            return False
        try:
            if int(parse_json(text)["launch"]) == self.launch:
                return True
        except (ValueError, KeyError, TypeError):
            pass
        _LOG.warning("%s: removed, since it is not for this launch; ask again with `longtake now`", path)
        return False

    def _ask(self, number: int) -> None:
        self._stop(b"stopping after this step with a checkpoint; press Ctrl-C again to stop at once")

    def _ask_in_time(self) -> None:
        self._stop(b"time_limit is near: stopping after this step with a checkpoint")

    def _stop(self, why: bytes) -> None:
        self.asked = True
        if self.announce:  # not by print: a signal may have come in the middle of one
            os.write(2, b"\n" + why + b"\n")


def read_flags(total: float) -> tuple[bool, int]:
    """Of the sum of all ranks' flags: whether any is to stop, and the bits of `REQUESTS`."""
    requests, stops = divmod(int(total), _REQUEST_UNIT)
    return stops > 0, requests


def request_file(folder: Path, name: str) -> Path:
    """Return the file in a run's folder by which something is asked of it."""
    return folder / f".now-{name}"


def seconds_left(minutes: float | None, passed: float) -> float | None:
    """Seconds from now until a launch that may take so many minutes, of which `passed` seconds are over, must begin to
    stop: 6 minutes before its end, or a tenth of its time where that is less. None: it need not."""
    if minutes is None:
        return None
    return 60 * max(minutes - 6, 0.9 * minutes) - passed


class FirstStepTimer:
    """Ends the process with one sentence and every thread's stack if `done` is not called in time.

    From outside, a run that waits for a missing rank, a stuck file system or a first compilation looks like one that
    works.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.report: Callable[[], None] | None = None  # writes down where this process is, if there is a folder for it
        self._start()

    def _start(self) -> None:
        self._timer = threading.Timer(self.seconds, self._give_up)
        self._timer.daemon = True
        self._timer.start()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Yield the body takes as long as it takes: after it, `seconds` begin anew."""
        self._timer.cancel()
        yield
        self._start()

    def done(self) -> None:
        """Turn the timer off: the first step is done."""
        self._timer.cancel()

    def _give_up(self) -> None:
        faulthandler.dump_traceback(file=sys.stderr)
        if self.report is not None:
            with suppress(OSError):  # the stacks are on the terminal
                self.report()
        print(
            f"first_step_timeout = {self.seconds:g}: no training step was finished in this many seconds; above is "
            "where each thread waits, look there for a missing process or a slow disk, or raise first_step_timeout",
            file=sys.stderr,
            flush=True,
        )
        leave_at_once(EXIT_NO_FIRST_STEP)
