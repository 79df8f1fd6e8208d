"""Asking a run that trains, from another process, by a file in its folder."""

from __future__ import annotations

import json
from pathlib import Path

from longtake import locks
from longtake.contracts import UserError
from longtake.durable import write_whole
from longtake.track.trackers import METRICS_FILE, read_lines
from longtake.train.config import RunWithoutTable
from longtake.train.folder import LOCK_FILE
from longtake.train.health.interrupt import request_file
from longtake.train.health.launches import read_launches
from longtake.train.run_file import read_run

_SAID = {
    "sample": "makes a validation",
    "save": "writes a checkpoint",
    "stop": "writes a checkpoint and stops",
}


def ask_run(folder: Path, what: str) -> str:
    """Ask the run in `folder` for "sample", "save" or "stop", and return what it will do, in one line. Raises
    `UserError` where nothing trains there, or it has no validations."""
    if not folder.is_dir():
        raise UserError(f"{folder}: is no folder of a run; give one, such as outputs/demo/run")
    config = read_run(str(folder), schema=RunWithoutTable).value
    if not is_training(folder):
        raise UserError(f"{folder}: no run is training there; start it with `longtake train {folder}`")
    if what == "sample" and config.validation is None:
        raise UserError(f"{folder}: this run has no `validation` section, so it can make none; `longtake generate` can")
    request = {"what": what, "launch": len(read_launches(folder))}
    write_whole(request_file(folder, what), json.dumps(request) + "\n", synced=False)
    made = read_lines(folder / METRICS_FILE)[-1:] if (folder / METRICS_FILE).exists() else []
    so_far = "".join(f"; step {line['step']} is made" for line in made)
    return f"{folder}: {_SAID[what]} after its present step{so_far}"


def is_training(folder: Path) -> bool:
    """Return whether a launch of the run is still training, by its folder: the last launch has no end recorded there,
    and its lock is held, where the file system has locks."""
    launches = read_launches(folder)
    if not launches or launches[-1].ended is not None:
        return False
    try:
        with (folder / LOCK_FILE).open("a", encoding="utf-8") as lock:
            locks.flock(lock, locks.LOCK_SH | locks.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    except OSError:  # no locks here
        return True
    return False
