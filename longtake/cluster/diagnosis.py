"""Why a launch failed, from what its hosts said last and how they ended; and whether starting it again helps."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from longtake.parallel.world import LOST_PEER

_LINES = 80  # of a host's last ones
USER_MISTAKE = 2  # exit code
MISTAKE = re.compile(r"longtake(?: \(rank \d+\))?: ")  # the sentence that goes with it begins so
_HANGS = (75, 76)  # no first step, no step: our own watchdogs
_KILLED, _ENDED = -9, -15  # signals


class Cause(Enum):
    """A class of failures: its name, and whether a run that is started again can go on."""

    DISK_FULL = "disk full", False
    OUT_OF_MEMORY = "out of memory", False
    GPU_LOST = "a GPU is lost", True
    BUG = "a mistake or a bug", False
    NODE_AWAY = "a node is away", True
    NO_PROGRESS = "NCCL time-out", True
    KILLED = "killed from outside", False
    UNKNOWN = "unknown", False

    def __init__(self, title: str, passes: bool) -> None:
        self.title, self.passes = title, passes


@dataclass(frozen=True)
class HostEnd:
    """How a host of a launch ended."""

    label: str
    code: int | None  # of the process that failed first, a signal as -number; None: the connection was lost
    lines: Sequence[str]  # what it said last
    first: bool = False  # whether it failed before the others


@dataclass(frozen=True)
class Diagnosis:
    """Why a launch failed, where, and the line that says so."""

    cause: Cause
    host: str
    evidence: str
    without: frozenset[str]  # hosts that a launch after this one leaves out

    @property
    def is_mistake(self) -> bool:
        """True for a user's mistake, which the process itself has printed with its remedy."""
        return self.cause is Cause.BUG and MISTAKE.match(self.evidence) is not None

    def __str__(self) -> str:
        return f"{self.cause.title}, on {self.host}" + (f" ({self.evidence})" if self.evidence else "")


_SAID = {
    Cause.DISK_FULL: r"No space left on device|[Dd]isk quota exceeded|\[Errno (28|122)\]|the disk is full",
    Cause.OUT_OF_MEMORY: r"CUDA out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED|Cannot allocate memory|"
    r"^MemoryError|std::bad_alloc|oom-kill|Out of memory: Killed|killed by signal: Killed|DefaultCPUAllocator: ",
    Cause.GPU_LOST: r"GPU is lost|fallen off the bus|uncorrectable (NVLink|ECC)|ECC error|\bXid\b|hardware stack error|"
    r"unspecified launch failure|no CUDA-capable device|devices are busy or unavailable|"
    r"Unable to determine the device handle|finds only \d+ CUDA devices",
    Cause.NO_PROGRESS: r"Watchdog caught collective operation timeout|milliseconds before timing out|"
    r"nccl(Remote|System|Internal)Error|remote process exited or there was a network error|"
    r"[Tt]imed out (waiting|after)|[Ww]ait timeout after|no (first )?step (within|for)",
}
_CUT = rf"{re.escape(LOST_PEER)}|DistBackendError|DistNetworkError|Connection (closed|reset) by|Broken pipe"
_PEERS = re.compile(rf"{_CUT}|(Signal|ChildFailed)\w*(Exception|Error)\b|SIGTERM|TCPStore")
_ERROR = re.compile(r"^(?:\[rank\d+\]: *)?(?:[\w.]+\.)?(\w*(?:Error|Exception|Interrupt|Exit|Warning))\b(?:: .*)?$")
_TRACEBACK = re.compile(r"^(?:\[rank\d+\]: *)?Traceback \(most recent call last\):")


def diagnose(ends: Sequence[HostEnd]) -> Diagnosis:
    """Return the cause of a failed launch. `ends`: of every host that did not end well, in the order of arrival.

    What one process dies of makes others lose a peer: a cause that is told outranks one that is felt.
    """
    away = frozenset(end.label for end in ends if end.code is None)
    for cause in (Cause.DISK_FULL, Cause.OUT_OF_MEMORY, Cause.GPU_LOST):
        for end in ends:
            if said := _first_match(_SAID[cause], end.lines):
                return Diagnosis(cause, end.label, said, away | {end.label} if cause.passes else away)
    for end in ends:
        if said := _own_error(end):
            return Diagnosis(Cause.BUG, end.label, said, away)
    for end in ends:
        if end.code is None and end.first:
            return Diagnosis(Cause.NODE_AWAY, end.label, "the connection was lost", away)
    for end in ends:
        if end.first and end.code == _KILLED:  # the others are killed where they do not end
            if said := _first_match("the kernel has ended a process", end.lines):
                return Diagnosis(Cause.OUT_OF_MEMORY, end.label, said, away)
            return Diagnosis(Cause.KILLED, end.label, "SIGKILL; if by the kernel, `dmesg` there says so", away)
    for end in ends:
        said = _first_match(_SAID[Cause.NO_PROGRESS], end.lines)
        if said or end.code in _HANGS:
            return Diagnosis(Cause.NO_PROGRESS, end.label, said or f"exit code {end.code}", away)
    if away:
        return Diagnosis(Cause.NODE_AWAY, min(away), "the connection was lost", away)
    for end in ends:
        if end.code is not None and end.code < 0 and end.code != _ENDED:
            return Diagnosis(Cause.BUG, end.label, f"signal {-end.code}", away)
    if all(end.code == _ENDED or _first_match(_CUT, end.lines) for end in ends):  # and nobody has ended by itself
        return Diagnosis(Cause.NO_PROGRESS, ends[0].label, _first_match(_CUT, ends[0].lines), away)
    return Diagnosis(Cause.UNKNOWN, ends[0].label, "", away)


def _first_match(pattern: str, lines: Sequence[str]) -> str:
    return next((line.strip()[:160] for line in lines[-_LINES:] if re.search(pattern, line)), "")


def _own_error(end: HostEnd) -> str:
    """Return the last line of a traceback that is not about a peer; for a user's mistake, the sentence that told it."""
    inside, last = False, ""
    for line in end.lines[-_LINES:]:
        if _TRACEBACK.match(line):
            inside = True
        elif inside and (found := _ERROR.match(line)):
            inside = False
            if not _PEERS.search(line) and not re.search(_SAID[Cause.NO_PROGRESS], line):
                last = last or found.group().strip()[:160]
    if last:
        return last
    if end.code == USER_MISTAKE:
        told = [line for line in end.lines[-_LINES:] if MISTAKE.match(line) and not _PEERS.search(line)]
        return told[-1][:160] if told else ""
    return ""
