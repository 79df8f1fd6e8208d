"""What the hosts say, line by line with the host in front, and the last of it for the summary."""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import BinaryIO

_LONGEST_LINE = 1 << 16  # bytes; a longer one is cut into lines
_KEPT_LINES = 400  # a host; torchrun's own report of a failure takes up to 100
_SHOWN_LINES = 6
_LONGEST_TRACEBACK = 100  # lines
_TRACEBACK = b"Traceback (most recent call last):"
_TORCHRUN_ENDS = re.compile(rb"torch\.distributed\.elastic\.[\w.]*(SignalException|ChildFailedError)\b")
_REPORT_RULE = b"=" * 60  # torchrun's report is between two of them
_LOG_OF_AN_END = re.compile(rb"[EW]\d{4} .*torch/distributed/elastic/multiprocessing/")
_MISTAKE = re.compile(rb"longtake(?: \(rank \d+\))?: (.+)")  # as a process prints a user's mistake
# From here on, it is torchrun that speaks of an end.
_END_BEGINS = re.compile(r"[EW]\d{4} .*torch/distributed/elastic/.*(\] failed \(exitcode|death signal)")
_RANK_FAILED = re.compile(r"^Root Cause .*?^  rank +: (\d+) .*?^  exitcode +: (-?\d+)", re.MULTILINE | re.DOTALL)


class Output:
    """Writes the lines of all hosts to stdout and stderr, as bytes. Threads of different hosts may call it at the same
    time.

    Hidden: the log lines, traceback and report with which torchrun ends when it is stopped or a process fails (the
    launch says which rank failed), and a mistake that another host has printed already.
    """

    def __init__(self, labels: Sequence[str], out: BinaryIO, error: BinaryIO) -> None:
        self._prefixes = [f"[{label}] ".encode() for label in labels]
        self._streams = {"O": out, "E": error}
        self._partial: dict[tuple[int, str], bytes] = {}
        self._tracebacks: dict[tuple[int, str], list[bytes]] = {}  # of which the end is still to come
        self._rules: dict[tuple[int, str], int] = {}  # rules still to come of torchrun's report
        self._mistakes: dict[bytes, int] = {}  # sentence -> the host that printed it first
        self._repeats: set[tuple[int, str]] = set()  # inside a mistake that another host has printed
        self._last: list[deque[bytes]] = [deque(maxlen=_KEPT_LINES) for _ in labels]
        self._lock = threading.Lock()
        self.closed = False  # nobody reads stdout any more

    def write(self, host: int, kind: str, content: bytes) -> None:
        """Take a piece of a host's stdout ("O") or stderr ("E"); whole lines are written."""
        *lines, rest = (self._partial.pop((host, kind), b"") + content).split(b"\n")
        while len(rest) > _LONGEST_LINE:
            lines.append(rest[:_LONGEST_LINE])
            rest = rest[_LONGEST_LINE:]
        if rest:
            self._partial[host, kind] = rest
        self._write_lines(host, kind, self._without_torchruns_tracebacks(host, kind, lines))

    def flush(self, host: int) -> None:
        for kind in self._streams:
            left = self._tracebacks.pop((host, kind), [])
            if rest := self._partial.pop((host, kind), b""):
                left.append(rest)
            self._write_lines(host, kind, left)

    def _without_torchruns_tracebacks(self, host: int, kind: str, lines: Iterable[bytes]) -> list[bytes]:
        """Return a traceback waits for its last line, the first that is not indented."""
        passed: list[bytes] = []
        for line in lines:
            held = self._tracebacks.get((host, kind))
            if held is None:
                if line == _TRACEBACK:
                    self._tracebacks[host, kind] = [line]
                else:
                    passed.append(line)
            elif line.startswith(b" ") and len(held) < _LONGEST_TRACEBACK:
                held.append(line)
            else:
                del self._tracebacks[host, kind]
                if not _TORCHRUN_ENDS.match(line):
                    passed += [*held, line]
                elif b"ChildFailedError" in line:
                    self._rules[host, kind] = 2
        return passed

    def _write_lines(self, host: int, kind: str, lines: Sequence[bytes]) -> None:
        self._last[host] += lines
        with self._lock:
            shown = [line for line in lines if not self._is_hidden(host, kind, line)]
            if not shown:
                return
            text = b"".join(self._prefixes[host] + line + b"\n" for line in shown)
            try:
                self._streams[kind].write(text)
                self._streams[kind].flush()
            except (OSError, ValueError):
                self.closed = True

    def _is_hidden(self, host: int, kind: str, line: bytes) -> bool:
        if self._rules.get((host, kind)):
            self._rules[host, kind] -= line == _REPORT_RULE
            return True
        if mistake := _MISTAKE.fullmatch(line):
            is_repeat = self._mistakes.setdefault(mistake[1], host) != host
            (self._repeats.add if is_repeat else self._repeats.discard)((host, kind))
        elif not line.startswith(b"  "):  # as the further lines of a mistake do
            self._repeats.discard((host, kind))
        return (host, kind) in self._repeats or _LOG_OF_AN_END.match(line) is not None

    def last_words(self, host: int) -> list[str]:
        """Return the last lines of a host before its torchrun began to speak of the end."""
        lines = self.lines(host)
        ends = [number for number, line in enumerate(lines) if _END_BEGINS.match(line)]
        return [line.rstrip() for line in lines[: ends[0] if ends else None] if line.strip()][-_SHOWN_LINES:]

    def failed_rank(self, host: int) -> tuple[int, int] | None:
        """Rank and exit code of the process that failed first on a host, as torchrun reports; a signal as -number."""
        found = _RANK_FAILED.findall("\n".join(self.lines(host)))
        return (int(found[-1][0]), int(found[-1][1])) if found else None

    def lines(self, host: int) -> list[str]:
        """Return the last lines of a host, torchrun's own included."""
        return [line.decode(errors="replace") for line in list(self._last[host])]
