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
# From here on, it is torchrun that speaks of an end.
_END_BEGINS = re.compile(r"[EW]\d{4} .*torch/distributed/elastic/.*(\] failed \(exitcode|death signal)")
_RANK_FAILED = re.compile(r"^Root Cause .*?^  rank +: (\d+) .*?^  exitcode +: (-?\d+)", re.MULTILINE | re.DOTALL)


class Output:
    """Writes the lines of all hosts to stdout and stderr, as bytes, without the traceback with which torchrun ends when
    it is stopped or a process fails (20 lines a host). Threads of different hosts may call it at the same time."""

    def __init__(self, labels: Sequence[str], out: BinaryIO, error: BinaryIO) -> None:
        self._prefixes = [f"[{label}] ".encode() for label in labels]
        self._streams = {"O": out, "E": error}
        self._partial: dict[tuple[int, str], bytes] = {}
        self._tracebacks: dict[tuple[int, str], list[bytes]] = {}  # of which the end is still to come
        self._last: list[deque[bytes]] = [deque(maxlen=_KEPT_LINES) for _ in labels]
        self._lock = threading.Lock()
        self.closed = False  # nobody reads stdout any more

    def write(self, host: int, kind: str, content: bytes) -> None:
        """Takes a piece of a host's stdout ("O") or stderr ("E"); whole lines are written."""
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
        """A traceback waits for its last line, the first that is not indented."""
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
        return passed

    def _write_lines(self, host: int, kind: str, lines: Sequence[bytes]) -> None:
        if not lines:
            return
        self._last[host] += lines
        text = b"".join(self._prefixes[host] + line + b"\n" for line in lines)
        with self._lock:
            try:
                self._streams[kind].write(text)
                self._streams[kind].flush()
            except (OSError, ValueError):
                self.closed = True

    def last_words(self, host: int) -> list[str]:
        """The last lines of a host before its torchrun began to speak of the end."""
        lines = self.lines(host)
        ends = [number for number, line in enumerate(lines) if _END_BEGINS.match(line)]
        return [line.rstrip() for line in lines[: ends[0] if ends else None] if line.strip()][-_SHOWN_LINES:]

    def failed_rank(self, host: int) -> tuple[int, int] | None:
        """Rank and exit code of the process that failed first on a host, as torchrun reports; a signal as -number."""
        found = _RANK_FAILED.findall("\n".join(self.lines(host)))
        return (int(found[-1][0]), int(found[-1][1])) if found else None

    def lines(self, host: int) -> list[str]:
        """The last lines of a host, torchrun's own included."""
        return [line.decode(errors="replace") for line in list(self._last[host])]
