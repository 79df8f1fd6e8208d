"""The list of samples that could not be loaded, kept beside a run: `quarantine.jsonl`.

One object a line: `{"path", "sample", "pass_index", "reason", "version"}`. A line is on disk before the step of its
sample runs, so a restart leaves the sample alone; from the next pass on the order leaves it out. Deleting a line gives
its sample another chance.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from longtake.contracts import ClipFault, UserError
from longtake.data.tables.checks import check_version
from longtake.durable import naming, sync_folder
from longtake.small_files import parse_json

VERSION = 1  # of a line


def read_quarantine(path: str | os.PathLike[str]) -> dict[int, int]:
    """`{sample id: the first pass it failed in}`; empty without the file. Raises as `list_quarantine`."""
    last_first = sorted(list_quarantine(path), key=lambda fault: -fault.pass_index)
    return {fault.sample: fault.pass_index for fault in last_first}


def list_quarantine(path: str | os.PathLike[str]) -> list[ClipFault]:
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
            entry = parse_json(line.rstrip(_CUT))
            newer = entry.get("version", 1) > VERSION
            fault = ClipFault(
                str(entry.get("path")), int(entry["sample"]), int(entry["pass_index"]), str(entry.get("reason"))
            )
            if not (0 <= fault.sample < 1 << 64 and 0 <= fault.pass_index < 1 << 63):
                raise ValueError("no number of a sample or a pass")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if number == len(lines) or line.endswith(_CUT):
                continue
            shown = line[:80].decode(errors="replace")
            raise UserError(f"{path}:{number}: {shown!r} is not a quarantine entry; mend or delete the line") from error
        if newer:
            check_version(entry["version"], VERSION, Path(f"{path}:{number}"))
        found.append(fault)
    return found


_CUT = b"\0"  # marks half a line that a later append closed


def append_quarantine(path: str | os.PathLike[str], faults: Iterable[ClipFault]) -> None:
    """Add faults in one write, so that lines of several processes do not mix, and wait until they are on disk."""
    lines = "".join(json.dumps(asdict(fault) | {"version": VERSION}, ensure_ascii=True) + "\n" for fault in faults)
    if not lines:
        return
    new = not os.path.exists(path)
    with naming(Path(path)):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            half = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
            data = (_CUT + b"\n" if half else b"") + lines.encode()
            if os.write(descriptor, data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    if new:
        sync_folder(Path(path).resolve().parent)
