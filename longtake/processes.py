"""Processes beside this one: deaf to the signals that are meant for it, and ended with it however it ends.

Imports the standard library alone: a program that starts beside a run has no time for more.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

# Signals that end a run; Windows has no SIGUSR1.
ENDING_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))
_DEAF_TO = ENDING_SIGNALS  # the parent decides what becomes of work under way
_SECONDS_BETWEEN_LOOKS = 1.0  # whether the parent still lives, where the system does not say so
_PR_SET_PDEATHSIG = 1  # prctl(2)
RESTARTS = "LONGTAKE_RESTARTS"  # the variable in which `longtake launch` counts its starts of a job after the first


def physical_bytes() -> int:
    """Return the memory that is built into this machine."""
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    kibibytes = ctypes.c_ulonglong()
    ctypes.windll.kernel32.GetPhysicallyInstalledSystemMemory(ctypes.byref(kibibytes))
    return 1024 * kibibytes.value


def restarts() -> int:
    """Return how often this job has been restarted, by torchrun, by Slurm or by `longtake launch`."""
    return sum(int(os.environ.get(name, "0")) for name in ("TORCHELASTIC_RESTART_COUNT", RESTARTS))


def start(target: Callable[..., object], args: tuple[Any, ...], method: str, name: str) -> BaseProcess:
    """Start `target(*args)` in a process; `method`: "fork" (at once, all memory shared) or "spawn" (afresh)."""
    everything = (*parent_facts(), target, args)
    process = multiprocessing.get_context(method).Process(target=_live, args=everything, daemon=True, name=name)
    if method == "spawn":
        resource_tracker.ensure_running()  # its start would lift the mask
    with born_deaf():
        process.start()
    return process


@contextmanager
def born_deaf() -> Iterator[None]:
    """Yield a process that is started inside is deaf from its first instruction on; a handler of its own
    comes later."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _DEAF_TO)
    try:
        with warnings.catch_warnings():  # newer Pythons warn of any fork beside threads; the children use no other
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def taken_signals(numbers: Collection[int], take: Callable[[int], object], once: bool = True) -> Iterator[None]:
    """Send these signals to `take`, inside the context, instead of their previous handlers; `once`: a second of the
    same goes to the previous one.

    Python lets the main thread alone take signals: in another one nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        take(number)
        if once:
            signal.signal(number, before[number])

    before = {number: signal.getsignal(number) or signal.SIG_DFL for number in numbers}
    for number in numbers:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def parent_facts() -> tuple[int, bool]:
    """Return the facts that `live_with` needs: the id of this process, and whether the system can end a child with it.

    Linux counts the thread that started a child as its parent, so that must be the one which ends last.
    """
    return os.getpid(), sys.platform == "linux" and threading.current_thread() is threading.main_thread()


def live_with(parent: int, by_system: bool) -> None:
    """Make this process a child that ends with its parent, whatever it is at; call it before anything slow."""
    for number in _DEAF_TO:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _DEAF_TO)
    if by_system:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_look_for, args=(parent,), daemon=True).start()
    if os.getppid() != parent:
        os._exit(1)


_FROZEN_STATES = ("T", "t", "D")  # of /proc: stopped, traced, in uninterruptible sleep


def end(process: BaseProcess, seconds: float = 0.0) -> None:
    """End a process; `seconds`: given to one that was asked to end by itself."""
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()


def frozen_mark(pid: int) -> tuple[str, ...] | None:
    """Counters that change whenever a process runs, of a process that is stopped by a signal or waits in the kernel for
    a disk; None for one that runs or can be interrupted, and on systems without /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    if fields[0] not in _FROZEN_STATES:
        return None
    return *fields[11:13], *(line for line in status.splitlines() if "ctxt_switches" in line)


class FrozenWatch:
    """Time for which a process has not run at all, as seen by the calls of `is_frozen`."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.every_seconds = seconds, min(5.0, seconds / 4)
        self._mark: object = None
        self._since = time.monotonic()

    def is_frozen(self, pid: int) -> bool:
        """Return True if a process has been frozen since `seconds`."""
        mark = frozen_mark(pid)
        if mark is None or (pid, mark) != self._mark:
            self._mark, self._since = (pid, mark), time.monotonic()
            return False
        return time.monotonic() - self._since >= self.seconds


def leave_at_once(code: int) -> NoReturn:
    """End this process, which hangs, and its children, which would outlive it."""
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(code)


def how_it_ended(code: int | None) -> str:
    """Describe an exit code: `killed by SIGKILL`, `exit code 3`."""
    return f"killed by {signal.Signals(-code).name}" if code and code < 0 else f"exit code {code or 0}"


def anonymous_file(name: str) -> int:
    """Return a file without a name, to be shared: in memory on Linux (/dev/shm is small in containers), else
    on a disk."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _live(parent: int, by_system: bool, target: Callable[..., object], args: tuple[Any, ...]) -> None:
    live_with(parent, by_system)
    target(*args)


def _look_for(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    os._exit(1)
