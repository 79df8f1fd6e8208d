"""The list of samples that could not be loaded, kept beside a run: `quarantine.jsonl`.

One object a line: `{"path", "sample", "pass_index", "reason", "version"}`. A line is on disk before the step of its
sample runs, so a restart leaves the sample alone; from the next pass on the order leaves it out. Deleting a line gives
its sample another chance.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from longtake.contracts import Fault, UserError
from longtake.data.formats import check_version
from longtake.durable import sync_folder

VERSION = 1  # of a line


def read_quarantine(path: str | os.PathLike[str]) -> dict[int, int]:
    """`{sample id: the first pass it failed in}`; empty without the file. Raises as `list_quarantine`."""
    found: dict[int, int] = {}
    for fault in list_quarantine(path):
        found[fault.sample] = min(fault.pass_index, found.get(fault.sample, fault.pass_index))
    return found


def list_quarantine(path: str | os.PathLike[str]) -> list[Fault]:
    """Every entry in the order written; none without the file.

    A line cut off by a crash is ignored: its step never ran. Any other unreadable line is a `UserError` with its
    number, since leaving it out would bring the sample back.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line.rstrip(_CUT))
            newer = entry.get("version", 1) > VERSION
            fault = Fault(
                str(entry.get("path")), int(entry["sample"]), int(entry["pass_index"]), str(entry.get("reason"))
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if number == len(lines) or line.endswith(_CUT):
                continue
            shown = line[:80].decode(errors="replace")
            raise UserError(f"{path}:{number}: {shown!r} is no quarantine entry; mend or delete the line") from error
        if newer:
            check_version(entry["version"], VERSION, Path(f"{path}:{number}"))
        found.append(fault)
    return found


_CUT = b"\0"  # marks half a line that a later append closed


def append_quarantine(path: str | os.PathLike[str], faults: Iterable[Fault]) -> None:
    """Adds faults in one write, so that lines of several processes do not mix, and waits until they are on disk."""
    lines = "".join(json.dumps(asdict(fault) | {"version": VERSION}, ensure_ascii=True) + "\n" for fault in faults)
    if not lines:
        return
    new = not os.path.exists(path)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        half = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        data = (_CUT + b"\n" if half else b"") + lines.encode()
        written = os.write(descriptor, data)
        if written != len(data):
            raise OSError(f"{path}: only {written} of {len(data)} bytes were written; is the disk full?")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if new:
        sync_folder(Path(path).resolve().parent)
