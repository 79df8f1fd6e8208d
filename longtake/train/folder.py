"""The folder of a run: which one a launch writes to, and what lies in it beside the checkpoints."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from longtake.checkpoint import CheckpointInfo, list_checkpoints, resolve
from longtake.config import Dialect, Resolved, dump_config, load_config
from longtake.contracts import UserError
from longtake.durable import write_whole
from longtake.parallel import World
from longtake.train.config import RunConfig
from longtake.train.stages import Words, read_curriculum, read_layers

CONFIG_FILE = "config.py"
QUARANTINE_FILE = "quarantine.jsonl"
LAUNCH_FILE = "launch.json"
LOCK_FILE = ".lock"
_LOCK_SECONDS = 5.0
_DATE = re.compile(r"^\d{6}_\d{6}-")


class FolderLock:
    """Keeps a second launch out of a run's folder as long as this one lives; the system takes it off a dead one.

    Two launches would delete each other's unfinished checkpoints and cut off each other's metrics.
    """

    def __init__(self, place: RunFolder, world: World) -> None:
        """Collective. Raises `UserError` where another launch works in the folder and does not end within seconds."""
        self._file: TextIO | None = None
        world.on_main(lambda: self._take(place.path))

    def _take(self, folder: Path) -> None:
        file = (folder / LOCK_FILE).open("a", encoding="utf-8")
        end = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() < end:  # a killed launch may still be on its way out
                    time.sleep(0.1)
                    continue
                file.close()
                raise UserError(
                    f"{folder}: another launch is training in this folder; stop it first, or start a run of its own "
                    "with --load"
                ) from None
            except OSError:  # a file system without locks
                break
        self._file = file

    def close(self) -> None:
        """Lets others in."""
        if self._file is not None:
            self._file.close()


@dataclass(frozen=True)
class RunFolder:
    """Where a launch writes, and the checkpoint it starts from, if any."""

    path: Path
    checkpoint: Path | None
    continues: bool  # an earlier launch made the folder; the checkpoint, if any, is its own
    restarted: bool = False  # the launcher started the processes again; the checkpoint, if any, goes on


def read_run(
    run: str,
    overrides: Sequence[str] = (),
    schema: type[RunConfig] = RunConfig,
    dialect: Dialect | None = None,
) -> Resolved[RunConfig]:
    """The config of RUN: a config file, or the folder of an earlier run, whose saved config is read.

    Two words of `overrides` are no keys: `--tiny`, and `--stage NAME` where the file has stages. `schema`: checks less
    than `RunConfig` where no model is built. `dialect`: the words that RUN and `overrides` are written in.
    """
    path, words = Path(run), Words.read(overrides, dialect)
    if (curriculum := read_curriculum(run, dialect)) is not None:
        return curriculum.resolve(curriculum.stage(words.stage), words, schema)
    if words.stage is not None:
        raise UserError(f"--stage {words.stage}: {run} has no stages; leave it out")
    if path.is_dir():
        file = path / CONFIG_FILE
        if not file.exists():
            if inner := sorted(one.parent.name for one in path.glob(f"*/{CONFIG_FILE}")):
                raise UserError(
                    f"{run}: holds the runs {', '.join(inner)}; give the file with the stages, or one of the folders"
                )
            raise UserError(f"{run}: no {CONFIG_FILE} in it; give a config file, or the folder of an earlier run")
        path = file
    return read_layers(path, words, schema)


def open_folder(config: RunConfig, world: World, source: str) -> RunFolder:
    """Chooses the folder of this launch on rank 0, for all ranks. Nothing in a folder that is continued is changed.

    A new launch gets a new folder. RUN being a folder continues its newest checkpoint; `resume = "auto"` that of the
    newest run of the same name that has one; both in place, with metrics after that checkpoint cut off. Where none has
    one, `resume = "auto"` begins anew in the last folder that a launch of that name has left. Processes that
    torchrun has started again (`--max-restarts`) go on in the folder of their first start, whatever they are told.
    """

    def choose() -> RunFolder:
        place = _begun_before(config) or _choose(config, source)
        _sign(place.path)
        return place

    return world.on_main(choose)


def _begun_before(config: RunConfig) -> RunFolder | None:
    """The folder that this job made or took before torchrun started its processes again; None in the first start."""
    outputs, job = Path(config.outputs), _job()
    if job is None or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) == 0:
        return None
    signed = [path for path in outputs.glob(f"*/{LAUNCH_FILE}") if _signature(path) == job]
    if config.exp_name is not None:  # a job with stages signs a folder for each
        signed = [path for path in signed if _numbered(config.exp_name).fullmatch(path.parent.name)]
    if not signed:
        return None
    folder = max(signed, key=lambda path: path.stat().st_mtime).parent
    if info := _newest(folder):
        return RunFolder(folder, info.path, continues=True, restarted=True)
    if config.load is not None:  # dead before its first own checkpoint
        return RunFolder(folder, resolve(config.load, outputs), continues=False, restarted=True)
    return RunFolder(folder, None, continues=True, restarted=True)


def _job() -> str | None:
    """What all starts of one torchrun have in common; None without it."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    run_id = os.environ["TORCHELASTIC_RUN_ID"]
    return run_id if run_id != "none" else f"{socket.gethostname()}-{os.getppid()}"  # the parent is torchrun


def _sign(folder: Path) -> None:
    """Leaves word of which job works in the folder."""
    if (job := _job()) is not None:
        (folder / LAUNCH_FILE).write_text(json.dumps({"job": job}) + "\n", encoding="utf-8")


def _signature(path: Path) -> str | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))["job"]
    except (OSError, ValueError, KeyError, TypeError):  # another job's, cut off: not ours
        return None


def take_over_quarantine(place: RunFolder, world: World) -> None:
    """A run that starts from another run's checkpoint leaves out what that one could not load. Collective."""

    def copy() -> None:
        if place.checkpoint is not None and not place.continues:
            known = place.checkpoint.parent / QUARANTINE_FILE
            if known.is_file():
                shutil.copyfile(known, place.path / QUARANTINE_FILE)

    world.on_main(copy)


def save_config(place: RunFolder, config: RunConfig, world: World) -> None:
    """Writes `config.py` on rank 0, once the config has proved to fit what the run goes on from. Collective."""
    world.on_main(lambda: _save_config(place.path, config))


def give_up(place: RunFolder, world: World) -> None:
    """Removes a folder that this launch has made."""
    if world.is_main and not place.continues and not place.restarted:
        shutil.rmtree(place.path, ignore_errors=True)


@contextmanager
def given_up_on_error(place: RunFolder, world: World) -> Iterator[None]:
    """Removes a folder that this launch has made if the body fails: a mistake found before step 1 leaves no litter."""
    try:
        yield
    except BaseException:
        give_up(place, world)
        raise


def _choose(config: RunConfig, source: str) -> RunFolder:
    outputs, name = Path(config.outputs), run_name(config, source)
    if Path(source).is_dir() and config.load is None:
        folder = Path(source)
        info = _newest(folder)
        return RunFolder(folder, info.path if info else None, continues=True)
    if config.resume == "auto":
        folders = _folders_of(config, outputs, name)
        if newest := [info for folder in folders if (info := _newest(folder))]:
            info = max(newest, key=lambda info: (info.when, info.step))
            return RunFolder(info.path.parent, info.path, continues=True)
        if left := [folder for folder in folders if _is_left(folder)]:
            return RunFolder(max(left, key=lambda folder: folder.stat().st_mtime), None, continues=True)
    checkpoint = resolve(config.load, outputs) if config.load is not None else None
    return RunFolder(_new_folder(outputs, name), checkpoint, continues=False)


def run_name(config: RunConfig, source: str) -> str:
    """The name of a run: `exp_name`, else date, time and the config file's name."""
    if config.exp_name is not None:
        return config.exp_name
    path = Path(source)
    stem = _bare(path.name) if path.is_dir() else path.stem
    return f"{time.strftime('%y%m%d_%H%M%S')}-{stem}"


def _bare(name: str) -> str:
    """A folder's name without its date."""
    return _DATE.sub("", name)


def _folders_of(config: RunConfig, outputs: Path, name: str) -> list[Path]:
    """The folders in `outputs` of the runs of one name.

    With `exp_name`, those are `name`, `name-2` and so on; a `name-2` whose own `exp_name` is "name-2" is another run.
    Without, those with another date before the name.
    """
    if config.exp_name is None:
        return [path for path in outputs.glob("*") if _DATE.match(path.name) and _bare(path.name) == _bare(name)]
    found = [path for path in outputs.glob("*") if _numbered(name).fullmatch(path.name)]
    return [path for path in found if path.name == name or _saved_name(path) == name]


def _is_left(folder: Path) -> bool:
    """Whether a launch has made this folder and is gone: it holds the launch's lock, or had no time for one.

    On a file system without locks nobody can tell, and the answer is no.
    """
    lock = folder / LOCK_FILE
    if not lock.is_file():
        return folder.is_dir() and {path.name for path in folder.iterdir()} <= {LAUNCH_FILE}
    with lock.open("a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True


def _numbered(name: str) -> re.Pattern[str]:
    """What folders of a name are called: the name, and later ones with a number."""
    return re.compile(re.escape(name) + r"(-\d+)?")


def _saved_name(folder: Path) -> str | None:
    """`exp_name` in the saved config of a run folder; None where there is none."""
    file = folder / CONFIG_FILE
    return load_config(file, [], dict[str, Any]).tree.get("exp_name") if file.is_file() else None


def _newest(folder: Path) -> CheckpointInfo | None:
    complete = [info for info in list_checkpoints(folder) if info.complete]
    return complete[-1] if complete else None


def _new_folder(outputs: Path, name: str) -> Path:
    """Makes `outputs/name`, or with the first number that is not taken."""
    number = 1
    while True:
        path = outputs / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            number += 1


def _save_config(folder: Path, config: RunConfig) -> None:
    """Writes `config.py`; an earlier one that differs is kept under a name with its number.

    What a launch started from is left out: the folder says that by itself when the run is continued.
    """
    lasting = config.model_copy(update={"load": None, "resume": None, "start_epoch": None, "start_step": None})
    path, text = folder / CONFIG_FILE, dump_config(lasting)
    if path.exists() and path.read_text(encoding="utf-8") != text:
        number = 1
        while (kept := folder / f"config.before-{number}.py").exists():
            number += 1
        os.replace(path, kept)
    write_whole(path, text)
