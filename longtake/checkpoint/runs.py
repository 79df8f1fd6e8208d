"""Checkpoints of a run: list them, find the one that is meant, keep the last few.

These look at the disk from one process; where all ranks need the answer, rank 0 asks and tells the others.
"""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from longtake.checkpoint.folder import PARTIAL_SUFFIX, parse_name, read_marker
from longtake.checkpoint.writer import MARKER
from longtake.contracts import UserError
from longtake.durable import sync_folder


@dataclass(frozen=True)
class CheckpointInfo:
    """One checkpoint folder of a run."""

    path: Path
    epoch: int
    step: int
    complete: bool  # False: cut off in the middle of its removal or of a copy; it can be neither loaded nor resumed
    num_bytes: int
    when: datetime  # UTC; when it was completed, or last changed


def list_checkpoints(run_folder: str | Path) -> list[CheckpointInfo]:
    """The checkpoints in a run folder, oldest step first. Working folders (`.partial`) are none."""
    folder = Path(run_folder)
    if not folder.is_dir():
        return []
    found = []
    for path in folder.iterdir():
        if path.is_dir() and parse_name(path.name):
            with suppress(FileNotFoundError):  # a run that goes on has just removed it
                found.append(_look_at(path))
    return sorted(found, key=lambda info: (info.step, info.epoch))


def _look_at(path: Path) -> CheckpointInfo:
    named = parse_name(path.name)
    try:
        marker = read_marker(path, any_version=True)
        epoch, step = named or (marker.epoch, marker.step)
        return CheckpointInfo(path, epoch, step, True, marker.num_bytes, marker.saved_at)
    except UserError:
        epoch, step = named or (0, 0)
        size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
        changed = datetime.fromtimestamp(path.stat().st_mtime, UTC)
        return CheckpointInfo(path, epoch, step, False, size, changed)


def resolve(spec: str | Path, outputs: str | Path = "outputs") -> Path:
    """The checkpoint folder that `spec` means.

    `spec`: `latest` (over all runs in `outputs`), a checkpoint folder, a run folder, a name in `outputs`, or a glob of
    any of these. Of several in one run the highest step is taken, of several runs the one saved last; incomplete ones
    are passed over. Raises UserError where no complete checkpoint is meant, with the incomplete ones that were seen.
    """
    places = _places(str(spec), Path(outputs))
    seen = [info for place in places for info in _checkpoints_at(place)]
    complete = [info for info in seen if info.complete]
    if complete:
        newest: dict[Path, CheckpointInfo] = {}
        for info in sorted(complete, key=lambda info: (info.step, info.epoch)):
            newest[info.path.parent] = info
        return max(newest.values(), key=lambda info: (info.when, info.step)).path
    shown = f"latest, in {outputs}/*" if str(spec) == "latest" else str(spec)
    if seen:
        cut = ", ".join(info.path.name for info in seen[-3:])
        raise UserError(f"{shown}: only incomplete checkpoints ({cut} without {MARKER}); choose another run")
    if places and str(spec) != "latest":
        raise UserError(f"{shown}: holds no checkpoint; give a folder that has epoch…-global_step… in it")
    raise UserError(f"{shown}: nothing is there; give a checkpoint folder, a run folder, a glob, or 'latest'")


@contextmanager
def hold(spec: str | Path, outputs: str | Path = "outputs") -> Iterator[Path]:
    """`resolve`, for a body that reads the checkpoint while its run may go on: it is not removed meanwhile."""
    while (lock := _lock(folder := resolve(spec, outputs), fcntl.LOCK_SH)) is None:
        pass  # removed in between: there is a newer one, or `resolve` says that there is none
    with lock:
        yield folder


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keeps `retain`, in whichever process, from removing a checkpoint while the body reads it.

    One that is gone, or a file system without locks, is passed over: the body finds out.
    """
    lock = _lock(folder, fcntl.LOCK_SH)
    try:
        yield
    finally:
        if lock is not None:
            lock.close()


def _lock(folder: Path, kind: int) -> BinaryIO | None:
    """COMPLETE of a checkpoint, locked; None where it is not there, or the lock is asked for at once and taken."""
    try:
        marker = (folder / MARKER).open("r+b" if kind & fcntl.LOCK_EX else "rb")
    except OSError:
        return None
    try:
        fcntl.flock(marker, kind)
    except BlockingIOError:
        marker.close()
        return None
    except OSError:  # no locks here: as if nobody else were there
        return marker
    if not (folder / MARKER).exists():  # removed by the one who had the lock
        marker.close()
        return None
    return marker


def _places(spec: str, outputs: Path) -> list[Path]:
    if spec == "latest":
        return sorted(path for path in outputs.glob("*") if path.is_dir())
    for path in (Path(spec).expanduser(), outputs / spec):
        if path.exists():
            return [path]
    for pattern in (os.path.expanduser(spec), str(outputs / spec)):
        if found := [Path(match) for match in sorted(glob.glob(pattern)) if os.path.isdir(match)]:
            return found
    return []


def _checkpoints_at(place: Path) -> Iterable[CheckpointInfo]:
    """The place itself where it is a checkpoint, otherwise those in it."""
    if place.name.endswith(PARTIAL_SUFFIX):
        return []
    if parse_name(place.resolve().name) or (place / MARKER).exists():
        return [_look_at(place)] if place.is_dir() else []
    return list_checkpoints(place)


def retain(run_folder: str | Path, keep_n_latest: int, keep_every: int | None = None) -> list[Path]:
    """Remove the oldest complete checkpoints of a run and return their paths. One process calls it (rank 0).

    `keep_n_latest`: how many of the newest stay; -1 keeps all. `keep_every`: steps divisible by it stay as well.
    COMPLETE goes first, so a removal that is cut off leaves no half checkpoint. One that is being read (`held`) stays
    until the next call. Raises UserError for other numbers.
    """
    if keep_n_latest != -1 and keep_n_latest < 1:
        raise UserError(f"keep_n_latest = {keep_n_latest}: choose -1 to keep all checkpoints, or at least 1")
    if keep_every is not None and keep_every < 1:
        raise UserError(f"keep_every = {keep_every}: choose a number of steps of at least 1, or leave it out")
    if keep_n_latest == -1:
        return []
    complete = [info for info in list_checkpoints(run_folder) if info.complete]
    old = [info for info in complete[:-keep_n_latest] if not (keep_every and info.step % keep_every == 0)]
    removed = []
    for info in old:
        lock = _lock(info.path, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if lock is not None:
            with lock:
                remove_checkpoint(info.path)
            removed.append(info.path)
    return removed


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint so that at no moment half of one can be taken for whole."""
    (folder / MARKER).unlink()
    sync_folder(folder)
    leftover = folder.with_name(folder.name + PARTIAL_SUFFIX)
    shutil.rmtree(leftover, ignore_errors=True)
    folder.rename(leftover)  # cut off from here on, the next save of the run finishes the removal
    shutil.rmtree(leftover)
