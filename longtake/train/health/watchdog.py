"""The hang watchdog: a run that makes no more steps logs the stack of every rank, and ends for its
launcher.

Each rank has its own. One rank that hangs stops the others in their next collective, so that all see it; whoever sees
it first makes the folder of reports, which calls the others.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from pathlib import Path

from longtake.durable import unfinished, write_whole
from longtake.processes import leave_at_once

EXIT_HANG = 76  # no step within `watchdog_seconds`
_GRACE_SECONDS = 30.0  # that a rank waits for the reports of the others
_LOOK_SECONDS = 2.0  # between two looks at the clock, at most
_DAY_SECONDS = 86_400.0
_REMEMBERED = "2000"  # collectives


def record_collectives() -> None:
    """Make PyTorch record the last collectives, which not all its versions do by default. Before `start_world`."""
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:  # the older name
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", _REMEMBERED)


def collective_timeout(first_step_seconds: float, hang_seconds: float | None) -> float:
    """Seconds after which a collective gives up: so late that `FirstStepTimer` and `Watchdog` report before.

    PyTorch's own end of a collective would abort the process in the middle of a report, or without any.
    """
    return max(first_step_seconds, _DAY_SECONDS if hang_seconds is None else hang_seconds) + 2 * _GRACE_SECONDS


class Watchdog:
    """A thread that ends the process where `beat` stays away for longer than `seconds`; None: there is no thread.

    It begins with the first beat: before it, `FirstStepTimer` watches. A process that hangs inside foreign code which
    holds Python's lock is not seen here, but its peers, which wait for it, are.
    """

    def __init__(self, seconds: float | None, folder: Path, rank: int, world_size: int) -> None:
        """`folder`: of the reports, the same on all ranks and new with each launch; it is made when it is needed."""
        self.seconds, self.folder, self.rank, self.world_size = seconds, folder, rank, world_size
        self._last: float | None = None
        self._step = 0
        self._over = threading.Event()

    def beat(self, step: int) -> None:
        """Step number `step` is made."""
        first, self._last, self._step = self._last is None, time.monotonic(), step
        if first and self.seconds is not None:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def close(self) -> None:
        """End the watch: the run is over."""
        self._over.set()

    def _watch(self) -> None:
        look = min(_LOOK_SECONDS, self.seconds / 4)
        while not self._over.wait(look):
            late = time.monotonic() - self._last > self.seconds
            if late or self.folder.exists():
                self._end(late)

    def _end(self, late: bool) -> None:
        """Report, wait a little for the reports of the others, and end the process."""
        try:
            self.report(late)
            deadline = time.monotonic() + _GRACE_SECONDS
            while time.monotonic() < deadline and len(list(self.folder.glob("rank-*.txt"))) < self.world_size:
                time.sleep(0.05)
        except OSError as error:  # a file system that hangs or is full must not keep the run from ending
            faulthandler.dump_traceback(file=sys.stderr)
            print(f"{self.folder}: {error.strerror}; the stacks are above", file=sys.stderr)
        if late:
            print(
                f"longtake (rank {self.rank}): watchdog_seconds = {self.seconds:g}: no step was finished in this many "
                f"seconds after step {self._step}; where each rank stands is in {self.folder}; look there for the rank "
                "that waits for something else than the others",
                file=sys.stderr,
                flush=True,
            )
        leave_at_once(EXIT_HANG)

    def report(self, late: bool = True) -> None:
        """Write where every thread of this process is, and what its collectives did last. Raises OSError."""
        report = self.folder / f"rank-{self.rank:05d}.txt"
        with unfinished(report, synced=False) as partial, partial.open("w", encoding="utf-8") as file:
            why = "made no step in time" if late else "was asked by another rank"
            print(f"rank {self.rank} of {self.world_size}, after step {self._step}: {why}\n", file=file, flush=True)
            faulthandler.dump_traceback(file=file, all_threads=True)
            if (flight := _flight_record()) is not None:
                write_whole(self.folder / f"flight-{self.rank:05d}.json", flight, synced=False)


def _flight_record() -> bytes | None:
    """Return PyTorch's record of the last collectives (which began, which ended), as JSON; None where it has none."""
    from torch._C import _distributed_c10d as c10d

    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        if hasattr(c10d, name):
            try:
                found = getattr(c10d, name)()
            except RuntimeError:
                continue
            return found if isinstance(found, bytes) else str(found).encode()
    return None
