"""Answers to a long list of questions, appended to a file as they come, so that a restart asks only the rest.

The first line says what the journal belongs to; each further line is a JSON list `[row, answer]`. A line is complete
or, after a crash, the last one is cut off and dropped. One process writes a journal at a time.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from longtake import locks
from longtake.contracts import UserError
from longtake.durable import naming
from longtake.small_files import parse_json

FORMAT_VERSION = 1
_LINES_HELD = 64
_SECONDS_HELD = 0.5  # what a kill can cost
_SECONDS_UNSYNCED = 10.0  # what a power cut can cost


class Journal:
    """An open journal. Use as a context manager; leaving it writes what is held.

    An answer that is a text says why there is none. A journal that holds no others is deleted when it is left, or
    begun anew: it would keep nothing, and must not stand in the way of a better question.
    """

    def __init__(self, path: Path, belongs_to: Mapping[str, Any]):
        """Open or start the journal at `path`.

        `belongs_to`: JSON values that must be the same for its answers to hold. Raises `UserError` where they are not,
        naming them, where the file is no journal, and where another process writes it.
        """
        self.path = path
        self._held: list[str] = []
        self._written = self._synced = time.monotonic()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115
        try:
            locks.flock(self._file, locks.LOCK_EX | locks.LOCK_NB)
        except OSError as error:  # some network file systems have no locks
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                self._file.close()
                raise UserError(f"{path}: another process is writing it; wait for it or stop it") from error
        try:
            self._start = self._find_start(dict(belongs_to))
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._file.closed:
            self._write()
            if not self._is_worth_keeping():
                self.path.unlink(missing_ok=True)
            self._file.close()

    def read(self) -> Iterator[tuple[int, Any]]:
        """Yield the answers so far: (row, answer), in the order they came."""
        with open(self.path, "rb") as file:
            file.seek(self._start)
            for line in file:
                with suppress(ValueError, TypeError):
                    row, answer = parse_json(line, finite=False)
                    if isinstance(row, int) and row >= 0 and isinstance(answer, (str, list)):
                        yield row, answer
                        continue
                raise UserError(f"{self.path}: {line[:60]!r} is not a line of a journal; delete the file")

    def add(self, row: int, answer: Any) -> None:
        """Note one answer; it reaches the file within half a second of the next one's coming."""
        self._held.append(json.dumps([row, answer]) + "\n")
        if len(self._held) >= _LINES_HELD or time.monotonic() - self._written > _SECONDS_HELD:
            self._write()

    def remove(self) -> None:
        """Delete the journal: its answers have been written elsewhere."""
        self._held.clear()
        self.path.unlink(missing_ok=True)
        self._file.close()

    def _is_worth_keeping(self) -> bool:
        try:
            return any(not isinstance(answer, str) for _, answer in self.read())
        except UserError:  # damaged: for its owner to decide
            return True

    def _find_start(self, belongs_to: dict[str, Any]) -> int:
        """Check or write the first line, drop a half last one, and return where the answers begin."""
        ours = {"format": "longtake journal", "version": FORMAT_VERSION} | belongs_to
        with open(self.path, "rb") as file:
            line = file.readline()
            size = sum(len(each) for each in chain([line], file) if each.endswith(b"\n"))
        os.ftruncate(self._file.fileno(), size)
        if not size:
            return self._begin(ours)
        theirs = None
        with suppress(ValueError):
            theirs = parse_json(line)
        if not isinstance(theirs, dict) or theirs.get("format") != ours["format"]:
            raise UserError(f"{self.path}: is not a journal of Longtake; delete it or give the output another name")
        differing = [name for name in ours if theirs.get(name) != ours[name]]
        self._start = len(line)
        if differing and theirs.get("version") == FORMAT_VERSION and not self._is_worth_keeping():
            os.ftruncate(self._file.fileno(), 0)
            return self._begin(ours)
        if differing:
            shown = ", ".join(f"{name} {theirs.get(name)!r} there, {ours[name]!r} here" for name in differing)
            raise UserError(f"{self.path}: was begun with another input ({shown}); delete it to start over")
        return len(line)

    def _begin(self, first_line: dict[str, Any]) -> int:
        self._held.append(json.dumps(first_line) + "\n")
        self._write()
        os.fsync(self._file.fileno())
        return self._file.seek(0, os.SEEK_END)

    def _write(self) -> None:
        data = memoryview("".join(self._held).encode())
        self._held.clear()
        with naming(self.path):
            while data:
                data = data[self._file.write(data) :]
        self._written = time.monotonic()
        if self._written - self._synced > _SECONDS_UNSYNCED:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()
