"""The folder of a run: the one that a launch writes to, and its contents other than checkpoints."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from longtake import locks
from longtake.checkpoint.runs import hold, last_whole, list_checkpoints
from longtake.config.dump import dump_config
from longtake.config.load import load_config
from longtake.contracts import UserError
from longtake.durable import write_whole
from longtake.encoders.autoencoder_config import AUTOENCODER_FILE
from longtake.processes import restarts
from longtake.small_files import parse_json, read_small
from longtake.train.config import NUMBER, RunConfig
from longtake.train.run_file import CONFIG_FILE

if TYPE_CHECKING:
    from longtake.parallel.world import World
    from longtake.weights.training_folder import TrainingFolder

QUARANTINE_FILE = "quarantine.jsonl"
LAUNCH_FILE = "launch.json"
LOCK_FILE = ".lock"
_LOCK_SECONDS = 5.0
_DATE = re.compile(r"^\d{6}_\d{6}-")


@dataclass(frozen=True)
class RunFolder:
    """Folder that a launch writes to, and the checkpoint it starts from, if any."""

    path: Path
    checkpoint: Path | None  # chosen by `starting_point`
    continues: bool  # an earlier launch made the folder; the checkpoint, if any, is its own
    elsewhere: TrainingFolder | None = None  # the same, where another program's training has left it
    restarted: bool = False  # the launcher started the processes again; the checkpoint, if any, is resumed


@contextmanager
def open_folder(config: RunConfig, world: World, source: str) -> Iterator[RunFolder]:
    """Choose the folder of this launch on rank 0, for all ranks, and keep other launches out while the body runs.

    A new launch gets a new folder. RUN being a folder is continued; so is, with `resume = "auto"`, the newest run of
    the same name that has a checkpoint, or, where none has one, the last folder that a launch of that name has left.
    Processes that torchrun has restarted (`--max-restarts`) continue in the folder of their first start, whatever the
    config says. `starting_point` looks into the folder: until it is locked, another launch may save.
    """
    with ExitStack() as stack:

        def choose() -> RunFolder:
            while True:
                place, seconds = _begun_before(config) or _find(config, source)
                if (lock := _lock(place.path, seconds)) is not None:
                    stack.enter_context(lock)
                    if (job := _job()) is not None:
                        write_whole(place.path / LAUNCH_FILE, json.dumps({"job": job}) + "\n")
                    return place
                if seconds and place.path.exists():
                    raise UserError(
                        f"{place.path}: another launch is training in this folder; stop it first, or start a run of "
                        "its own with --load"
                    )

        yield world.on_main(choose)


@contextmanager
def starting_point(place: RunFolder, config: RunConfig, world: World) -> Iterator[RunFolder]:
    """Yield the folder with the checkpoint that the run starts from, which nobody removes while the body runs.

    That is the last whole one of a run that is continued, with metrics after it cut off; for another it is what `load`
    names. Collective.
    """
    with ExitStack() as held:
        if place.continues:
            checkpoint = last_whole(place.path, world)
        elif (elsewhere := left_elsewhere(config)) is not None:
            yield replace(place, checkpoint=elsewhere.path, elsewhere=elsewhere)
            return
        elif config.load is not None:
            checkpoint = world.on_main(lambda: held.enter_context(hold(config.load, config.outputs)))
        else:
            checkpoint = None
        yield replace(place, checkpoint=checkpoint)


def started_with(place: RunFolder) -> dict[str, Any] | None:
    """Return the config stored in the folder of a run that is resumed; None for a new run."""
    file = place.path / CONFIG_FILE
    return load_config(file, [], dict[str, Any]).tree if place.continues and file.is_file() else None


def left_elsewhere(config: RunConfig) -> TrainingFolder | None:
    """Return the training folder of another program that `load` names; None where it names none."""
    return None if config.load is None else config.family.training_folder(config.load)


def _lock(folder: Path, seconds: float) -> TextIO | None:
    """Return the lock of a folder, which the system takes off a launch that dies; None where the folder is gone, or
    another launch has the lock and does not end within `seconds`.

    Two launches would delete each other's unfinished checkpoints and cut off each other's metrics.
    """
    path, end = folder / LOCK_FILE, time.monotonic() + seconds
    with suppress(FileNotFoundError):
        file = path.open("a", encoding="utf-8")
        while not _locks(file):
            if time.monotonic() >= end:
                file.close()
                return None
            time.sleep(0.1)  # a killed launch may still be on its way out
        if os.path.samestat(os.fstat(file.fileno()), path.stat()):  # else the launch before has given the folder up
            return file
    return None


def _locks(file: TextIO) -> bool:
    try:
        locks.flock(file, locks.LOCK_EX | locks.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: as if nobody else were there
        pass
    return True


def _begun_before(config: RunConfig) -> tuple[RunFolder, float] | None:
    """Find, as `_find` does, the folder that this job made or took before its processes were started again; None in the
    first start."""
    outputs, job = Path(config.outputs), _job()
    if job is None or not restarts():
        return None
    signed = [path for path in outputs.glob(f"*/{LAUNCH_FILE}") if _signature(path) == job]
    if config.exp_name is not None:  # a job with stages signs a folder for each
        signed = [path for path in signed if _numbered(config.exp_name).fullmatch(path.parent.name)]
    if not signed:
        return None
    folder = max(signed, key=lambda path: path.stat().st_mtime).parent
    own = config.load is None or bool(list_checkpoints(folder))  # else it died before its first own checkpoint
    return RunFolder(folder, None, continues=own, restarted=True), _LOCK_SECONDS


def _job() -> str | None:
    """Return the id that all starts of one torchrun share; None without it."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    run_id = os.environ["TORCHELASTIC_RUN_ID"]
    return run_id if run_id != "none" else f"{socket.gethostname()}-{os.getppid()}"  # the parent is torchrun


def _signature(path: Path) -> str | None:
    try:
        return parse_json(read_small(path))["job"]
    except (OSError, ValueError, KeyError, TypeError):  # another job's, cut off: not ours
        return None


def take_over_quarantine(place: RunFolder, world: World) -> None:
    """Copy the quarantine of another run whose checkpoint this run starts from: samples that could not be loaded are
    skipped. Collective."""
    if place.checkpoint is not None and not place.continues:
        known = place.checkpoint.parent / QUARANTINE_FILE
        world.on_main(lambda: known.is_file() and write_whole(place.path / QUARANTINE_FILE, known.read_bytes()))


def give_up(place: RunFolder, world: World) -> None:
    """Remove a folder that this launch has made."""
    if world.is_main and not place.continues and not place.restarted:
        shutil.rmtree(place.path, ignore_errors=True)


@contextmanager
def given_up_on_error(place: RunFolder, world: World) -> Iterator[None]:
    """Remove a folder that this launch has made if the body fails: a mistake found before step 1 leaves none."""
    try:
        yield
    except BaseException:
        give_up(place, world)
        raise


def _find(config: RunConfig, source: str) -> tuple[RunFolder, float]:
    """Return the folder of this launch, and how many seconds it may wait for the lock; 0: another folder will do."""
    outputs, name = Path(config.outputs), run_name(config, source)
    if Path(source).is_dir() and config.load is None:
        return RunFolder(Path(source), None, continues=True), _LOCK_SECONDS
    if config.resume == "auto":
        folders = _folders_of(config, outputs, name)
        if saved := [info for folder in folders for info in list_checkpoints(folder) if info.complete]:
            newest = max(saved, key=lambda info: (info.when, info.step))
            return RunFolder(newest.path.parent, None, continues=True), _LOCK_SECONDS
        if left := [folder for folder in folders if _is_left(folder)]:
            return RunFolder(max(left, key=lambda folder: folder.stat().st_mtime), None, continues=True), 0.0
    return RunFolder(_new_folder(outputs, name), None, continues=False), 0.0


def run_name(config: RunConfig, source: str) -> str:
    """Return the name of a run: `exp_name`, else date, time and the config file's name."""
    if config.exp_name is not None:
        return config.exp_name
    path = Path(source)
    stem = _bare(path.name) if path.is_dir() else path.stem
    return f"{time.strftime('%y%m%d_%H%M%S')}-{stem}"


def _bare(name: str) -> str:
    """Return a folder's name without its date."""
    return _DATE.sub("", name)


def _folders_of(config: RunConfig, outputs: Path, name: str) -> list[Path]:
    """Return the folders in `outputs` of the runs of one name.

    With `exp_name`, those are `name`, `name-2` and so on; a `name-2` whose own `exp_name` is "name-2" is another run.
    Without, those with another date before the name.
    """
    if config.exp_name is None:
        return [path for path in outputs.glob("*") if _DATE.match(path.name) and _bare(path.name) == _bare(name)]
    found = [path for path in outputs.glob("*") if _numbered(name).fullmatch(path.name)]
    return [path for path in found if path.name == name or _saved_name(path) == name]


def _is_left(folder: Path) -> bool:
    """Return whether the launch that made this folder is gone: it holds the launch's lock, or had no time for one.

    On a file system without locks nobody can tell, and the answer is no.
    """
    lock = folder / LOCK_FILE
    if not lock.is_file():
        return folder.is_dir() and {path.name for path in folder.iterdir()} <= {LAUNCH_FILE}
    with lock.open("a", encoding="utf-8") as file:
        try:
            locks.flock(file, locks.LOCK_EX | locks.LOCK_NB)
        except OSError:
            return False
    return True


def _numbered(name: str) -> re.Pattern[str]:
    """Return the pattern of the folders of a name: the name, and later ones with a number."""
    return re.compile(re.escape(name).replace(re.escape(NUMBER), r"\d{3,}") + r"(-\d+)?")


def _saved_name(folder: Path) -> str | None:
    """`exp_name` in the saved config of a run folder; None where there is none."""
    file = folder / CONFIG_FILE
    return load_config(file, [], dict[str, Any]).tree.get("exp_name") if file.is_file() else None


def _new_folder(outputs: Path, name: str) -> Path:
    """Make `outputs/name`, or with the first number that is not taken."""
    number = _next_number(outputs) if NUMBER in name else 1
    while True:
        path = outputs / (_with_number(name, number) if NUMBER in name or number == 1 else f"{name}-{number}")
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            number += 1


def new_name(config: RunConfig, source: str) -> str:
    """Return the folder name of a run that starts now."""
    name = config.exp_name or Path(source).stem
    return _with_number(name, _next_number(Path(config.outputs))) if NUMBER in name else name


def _with_number(name: str, number: int) -> str:
    return name.replace(NUMBER, f"{number:03}")


def _next_number(outputs: Path) -> int:
    """One more than the highest number with which the name of a folder in `outputs` begins."""
    numbers = [int(match[1]) for path in outputs.glob("*") if (match := re.match(r"(\d{3,6})-", path.name))]
    return max(numbers, default=0) + 1


def save_config(folder: Path, config: RunConfig) -> None:
    """Write `config.py`; an earlier one that differs is kept under a name with its number.

    What a launch started from is left out: the folder says that by itself when the run is continued.
    """
    lasting = config.model_copy(update={"load": None, "resume": None, "start_epoch": None, "start_step": None})
    if getattr(config.ae, "from_pretrained", None) == str(folder / AUTOENCODER_FILE):
        lasting = lasting.model_copy(update={"ae": config.ae.model_copy(update={"from_pretrained": None})})
    path, text = folder / CONFIG_FILE, dump_config(lasting)
    try:
        before = read_small(path) if path.exists() else text.encode()
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be kept beside its successor ({error}); remove it or rename it") from error
    if before != text.encode():
        number = 1
        while (kept := folder / f"config.before-{number}.py").exists():
            number += 1
        write_whole(kept, before)  # a copy: at no moment is there no config.py
    write_whole(path, text)
