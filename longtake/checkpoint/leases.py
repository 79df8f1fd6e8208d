"""Leases: a checkpoint that is read by another process, also on another machine, stays where it is until it is read.

A lease is a file in `.leases` of the run's folder, touched again and again by who holds it. It ends with its holder:
at once where that ran on this machine, else `SECONDS` after the last touch.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from longtake.small_files import parse_json, read_small

FOLDER = ".leases"
SECONDS = 600.0
_TOUCH_SECONDS = 60.0


@contextmanager
def leased(checkpoint: Path) -> Iterator[None]:
    """Keep `retain`, on whichever machine, from removing a checkpoint while the body reads it. Raises OSError where no
    lease can be written."""
    folder = checkpoint.parent / FOLDER
    folder.mkdir(exist_ok=True)
    path = folder / f"{checkpoint.name}.{socket.gethostname()}-{os.getpid()}"
    path.write_text(json.dumps({"host": socket.gethostname(), "pid": os.getpid()}) + "\n", encoding="utf-8")
    ended = threading.Event()

    def touch() -> None:
        while not ended.wait(_TOUCH_SECONDS):
            with suppress(OSError):
                os.utime(path)

    threading.Thread(target=touch, daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        path.unlink(missing_ok=True)


def is_leased(checkpoint: Path) -> bool:
    """Return True if another process reads a checkpoint; remove leases whose holder is gone.

    Leases may be other users' files: one that cannot be read or removed never raises. Entries that are no regular
    files are no leases.
    """
    held = False
    for path in (checkpoint.parent / FOLDER).glob(f"{checkpoint.name}.*"):
        with suppress(OSError):  # released meanwhile, a link to itself, or another user's
            if not path.is_file():
                continue
            if _holds(path):
                held = True
            else:
                path.unlink()
    return held


def _holds(path: Path) -> bool:
    if time.time() - path.stat().st_mtime > SECONDS:
        return False
    try:
        holder = parse_json(read_small(path))
        if holder["host"] != socket.gethostname():
            return True
        os.kill(int(holder["pid"]), 0)
    except ProcessLookupError:
        return False
    except (ValueError, KeyError, TypeError, OverflowError, OSError):  # being written, forged, or another user's
        return True
    return True
