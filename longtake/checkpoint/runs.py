"""Checkpoints of a run: list them, find the one that a name stands for or the last whole one, keep the last few.

All but `last_whole` look at the disk from one process; where all ranks need the answer, rank 0 broadcasts it.
"""

from __future__ import annotations

import glob
import logging
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from longtake import locks
from longtake.checkpoint.folder import PARTIAL_SUFFIX, check_all, damage_sentence, glance, parse_name, read_marker
from longtake.checkpoint.leases import is_leased
from longtake.checkpoint.writer import MARKER
from longtake.contracts import UserError
from longtake.durable import replace

if TYPE_CHECKING:
    from longtake.parallel.world import World

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointInfo:
    """One checkpoint folder of a run."""

    path: Path
    epoch: int
    step: int
    complete: bool  # False: cut off in the middle of a copy, or damaged; it can be neither loaded nor resumed
    num_bytes: int
    when: datetime  # UTC; when it was completed, or last changed


def list_checkpoints(run_folder: str | Path) -> list[CheckpointInfo]:
    """Return the checkpoints in a run folder, oldest step first. Working folders (`.partial`) are none."""
    folder = Path(run_folder)
    if not folder.is_dir():
        return []
    found = []
    for path in folder.iterdir():
        if path.is_dir() and parse_name(path.name):
            with suppress(FileNotFoundError):  # the run has just removed it
                found.append(_look_at(path))
    return sorted(found, key=lambda info: (info.step, info.epoch))


def _look_at(path: Path) -> CheckpointInfo:
    named = parse_name(path.name)
    try:
        marker = read_marker(path, any_version=True)
        moment = named or (marker.epoch, marker.step)
        return CheckpointInfo(path, *moment, True, marker.num_bytes, marker.saved_at)
    except UserError:
        size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
        changed = datetime.fromtimestamp(path.stat().st_mtime, UTC)
        return CheckpointInfo(path, *(named or (0, 0)), False, size, changed)


def resolve(spec: str | Path, outputs: str | Path = "outputs") -> Path:
    """Return the checkpoint folder that `spec` means.

    `spec`: `latest` (over all runs in `outputs`), a checkpoint folder, a run folder, a name in `outputs`, or a glob of
    any of these. Of several in one run the highest step is taken, of several runs the one saved last. Raises UserError
    where there is none, and where the one that is meant is damaged, as far as a `glance` can tell: an older one is
    named, but not used instead. One that `spec` names itself must be complete, no more.
    """
    places = _places(str(spec), Path(outputs))
    seen = [info for place in places for info in _checkpoints_at(place)]
    newest: dict[Path, CheckpointInfo] = {}
    for info in sorted(seen, key=lambda info: (info.step, info.epoch)):
        newest[info.path.parent] = info
    shown = f"latest, in {outputs}/*" if str(spec) == "latest" else str(spec)
    if newest:
        meant = max(newest.values(), key=lambda info: (info.when, info.step)).path
        by_itself = newest[meant.parent].complete and places == [meant]
        if not by_itself and (faults := glance(meant)) and meant.exists():
            raise UserError(damage_sentence(meant, faults))
        return meant
    if places and str(spec) != "latest":
        folders = [inner for place in places if place.is_dir() for inner in sorted(place.iterdir()) if inner.is_dir()]
        if runs := [str(inner) for inner in folders if list_checkpoints(inner)]:
            raise UserError(f"{shown}: holds no checkpoint of its own; give one of the runs in it: {', '.join(runs)}")
        raise UserError(f"{shown}: holds no checkpoint; give a folder that has epoch…-global_step… in it")
    raise UserError(f"{shown}: nothing is there; give a checkpoint folder, a run folder, a glob, or 'latest'")


@contextmanager
def hold(spec: str | Path, outputs: str | Path = "outputs") -> Iterator[Path]:
    """`resolve`, for a body that reads the checkpoint: its run, if still training, does not remove it meanwhile."""
    while (lock := _lock(folder := resolve(spec, outputs), locks.LOCK_SH)) is None:
        pass  # removed in between: there is a newer one, or `resolve` says that there is none
    with lock:
        yield folder


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep `retain`, in whichever process, from removing a checkpoint while the body reads it.

    One that is gone, or a file system without locks, is passed over: the body finds out.
    """
    with _lock(folder, locks.LOCK_SH) or nullcontext():
        yield


def _lock(folder: Path, kind: int) -> BinaryIO | None:
    """COMPLETE of a checkpoint, locked; None where it is not there, or the lock is asked for at once and taken."""
    try:
        marker = (folder / MARKER).open("r+b" if kind & locks.LOCK_EX else "rb")
    except OSError:
        return None
    try:
        locks.flock(marker, kind)
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
    """Return the place itself where it is a checkpoint, otherwise those in it."""
    if place.name.endswith(PARTIAL_SUFFIX):
        return []
    if parse_name(place.resolve().name) or (place / MARKER).exists():
        return [_look_at(place)] if place.is_dir() else []
    return list_checkpoints(place)


def retain(run_folder: str | Path, keep_n_latest: int, keep_every: int | None = None) -> list[Path]:
    """Remove the oldest complete checkpoints of a run and return their paths. One process calls it (rank 0).

    `keep_n_latest`: how many of the newest stay; -1 keeps all. `keep_every`: steps divisible by it stay as well.
    A removal that is cut off leaves no half checkpoint. One that is being read (`held`, `leased`) stays for now."""
    assert keep_n_latest == -1 or keep_n_latest > 0, keep_n_latest  # the config has refused others
    if keep_n_latest == -1:
        return []
    complete = [info for info in list_checkpoints(run_folder) if info.complete]
    old = [info for info in complete[:-keep_n_latest] if not (keep_every and info.step % keep_every == 0)]
    removed = []
    for info in old:
        if is_leased(info.path):
            continue
        lock = _lock(info.path, locks.LOCK_EX | locks.LOCK_NB)
        if lock is None:
            continue
        with lock:
            try:
                remove_checkpoint(info.path)
            except OSError as error:  # such as another user's file in it; must not end a run that trains
                _LOG.warning("%s: cannot be removed (%s); delete it by hand", info.path, error.strerror)
                continue
        removed.append(info.path)
    return removed


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint so that at no moment half of one can be taken for whole."""
    leftover = folder.with_name(folder.name + PARTIAL_SUFFIX)
    shutil.rmtree(leftover, ignore_errors=True)
    replace(folder, leftover)  # cut off from here on, `sweep` finishes the removal
    shutil.rmtree(leftover)


def sweep(run_folder: Path) -> None:
    """Remove, and names, what cut-off saves and removals have left: `.partial` folders, and checkpoints without
    COMPLETE that are older than one that has it. Only the holder of the run's lock may call it."""
    infos = list_checkpoints(run_folder)
    newest = max((info.step for info in infos if info.complete), default=-1)
    left = [info.path for info in infos if info.step < newest and not (info.path / MARKER).exists()]
    for path in [*run_folder.glob(f"epoch*-global_step*{PARTIAL_SUFFIX}"), *left]:
        try:
            shutil.rmtree(path)
        except OSError as error:
            _LOG.warning("%s: cannot be removed (%s); delete it by hand", path, error.strerror)
            continue
        _LOG.warning("%s: removed, since a save or a removal was cut off there", path)


def set_aside(folder: Path) -> Path:
    """Take its name from a damaged checkpoint, so that the run can save that step again; nothing is deleted."""
    number = 1
    while (aside := folder.with_name(f"{folder.name}.damaged{'' if number == 1 else f'-{number}'}")).exists():
        number += 1
    replace(folder, aside)
    return aside


def last_whole(run_folder: Path, world: World) -> Path | None:
    """Return the newest checkpoint of a run whose every byte is as it was written; None where the run has none.
    Collective.

    Only the holder of the run's lock may call it: newer ones, which are damaged, are reported and renamed; leftovers
    of cut-off saves are removed. Raises UserError where all are damaged, or one is of another format.
    """
    faults: dict[Path, list[str]] = {}
    infos = world.on_main(lambda: list_checkpoints(run_folder))
    for path in [info.path for info in reversed(infos)]:
        found = world.on_main(lambda path=path: glance(path)) or check_all(path, world)
        if not found:
            world.on_main(lambda path=path: _tidy(run_folder, faults, path))
            return path
        faults[path] = found
    if faults:
        path, found = next(iter(faults.items()))
        more = f", as are the {len(faults) - 1} before it" if len(faults) > 1 else ""
        raise UserError(
            f"{path}: is damaged ({found[0]}){more}; none is left to go on from: restore one, or start a run of "
            "another name"
        )
    world.on_main(lambda: sweep(run_folder))
    return None


def _tidy(run_folder: Path, damaged: dict[Path, list[str]], whole: Path) -> None:
    for path, faults in damaged.items():
        _LOG.warning(
            "%s: is damaged (%s); kept aside as %s; going on from %s", path, faults[0], set_aside(path).name, whole.name
        )
    sweep(run_folder)
