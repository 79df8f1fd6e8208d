"""Writes the files of a checkpoint and completes it: in the run's process, or as a program of its own beside it.

As a program (`python writer.py FD`, then what `processes.parent_facts` says) it takes jobs, one line of JSON each, from
its standard input, and answers each with lines of JSON on its standard output: `{"written": true}`, on rank 0 then
`{"committed": true}`, or `{"error": sentence, "errno": number or null}`. Tensor bytes come through the memory file FD,
which it shares with the run. It knows nothing of tensors and imports nothing but the standard library, `durable` and
`processes`, so it starts at once and stays small. It ends with its parent: nothing is written for a run that is dead,
and a run that is started again meets no writer of the old one.

Ranks need no connection between their writers: each leaves `written-<rank>.json` in the working folder, and rank 0's
waits for all of them before it writes COMPLETE.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
import zlib
from collections.abc import Iterable
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

from longtake import processes
from longtake.durable import naming, replace, write_whole

MARKER = "COMPLETE"
STATE_FILE = "run.json"
BLOCK_BYTES = 1 << 24
_POLL_SECONDS = 0.02  # between looks for other ranks' files; grows up to
_MOST_POLL_SECONDS = 2.0

Record = dict[str, Any]  # {"num_bytes": int, "crc32": eight hexadecimal digits, "head_crc32": the same of the head}


def write_shard(path: Path, header: bytes, pieces: Iterable[memoryview]) -> Record:
    """Write and fsync one safetensors file (its head, then the bytes of its tensors); return size and checksum."""
    size, crc, head = 0, 0, zlib.crc32(header)
    with naming(path), path.open("wb", buffering=0) as stream:
        for piece in chain([memoryview(header)], pieces):  # taken one by one: each may be a copy of its own
            for start in range(0, len(piece), BLOCK_BYTES):
                block = piece[start : start + BLOCK_BYTES]
                crc = zlib.crc32(block, crc)
                size += _write_all(stream.fileno(), block)
        os.fsync(stream.fileno())
    return {"num_bytes": size, "crc32": f"{crc:08x}", "head_crc32": f"{head:08x}"}


def _write_all(descriptor: int, block: memoryview) -> int:
    """Write all of `block`, also where the system takes it in parts."""
    done = 0
    while done < len(block):
        done += os.write(descriptor, block[done:])
    return done


def commit(partial: Path, target: Path, state: bytes, marker: dict[str, Any], files: dict[str, Record]) -> None:
    """Write run.json and COMPLETE into the working folder, then gives it its name."""
    write_whole(partial / STATE_FILE, state)
    listed = {**files, STATE_FILE: {"num_bytes": len(state), "crc32": f"{zlib.crc32(state):08x}"}}
    content = {**marker, "saved_at": datetime.now(UTC).isoformat(), "files": listed}
    write_whole(partial / MARKER, json.dumps(content, indent=1).encode())
    replace(partial, target)


def _run_job(job: dict[str, Any], descriptor: int) -> None:
    """One checkpoint: this rank's files, and on rank 0 the completion."""
    partial, rank = Path(job["partial"]), int(job["rank"])
    records = {}
    # Never closed by hand: that would fail, and hide an error, where the error's traceback still looks into it.
    staged = memoryview(mmap.mmap(descriptor, os.fstat(descriptor).st_size, access=mmap.ACCESS_READ))
    for file in job["files"]:
        piece = staged[file["start"] : file["start"] + file["num_bytes"]]
        records[file["name"]] = write_shard(partial / file["name"], file["header"].encode("latin-1"), [piece])
    write_whole(partial / _written_name(rank), json.dumps(records).encode())
    _answer({"written": True})
    if rank == 0:
        files = _gather_records(partial, int(job["marker"]["world_size"]))
        commit(partial, Path(job["target"]), job["state"].encode("latin-1"), job["marker"], files)
        _answer({"committed": True})


def _gather_records(partial: Path, world: int) -> dict[str, Record]:
    """What all ranks have written, once the last of them has; their notes are removed."""
    files: dict[str, Record] = {}
    pause = _POLL_SECONDS
    for rank in range(world):
        note = partial / _written_name(rank)
        while not note.exists():
            time.sleep(pause)
            pause = min(2 * pause, _MOST_POLL_SECONDS)
            os.listdir(partial)  # has a network file system look again
        files |= json.loads(note.read_bytes())
    for rank in range(world):
        (partial / _written_name(rank)).unlink()
    return files


def _written_name(rank: int) -> str:
    return f"written-{rank + 1:05d}.json"


def _answer(content: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(content) + "\n")
    sys.stdout.flush()


def main() -> None:
    """The program: jobs in, answers out, until the input ends."""
    descriptor, parent, by_system = map(int, sys.argv[1:])
    processes.live_with(parent, bool(by_system))
    os.nice(5)  # the run's own threads come first
    for line in sys.stdin:
        try:
            _run_job(json.loads(line), descriptor)
        except Exception as error:
            number = error.errno if isinstance(error, OSError) else None
            text = error.strerror if isinstance(error, OSError) else None
            _answer({"error": text or f"{type(error).__name__}: {error}", "errno": number})


if __name__ == "__main__":
    main()
