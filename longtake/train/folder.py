"""The folder of a run: which one a launch writes to, and what lies in it beside the checkpoints."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from longtake.checkpoint import list_checkpoints, resolve
from longtake.config import Resolved, dump_config, load_config
from longtake.contracts import UserError
from longtake.parallel import World
from longtake.train.config import RunConfig

CONFIG_FILE = "config.py"
_NUMBERED = re.compile(r"^(?:\d{6}_\d{6}-)?(?P<name>.*?)(?:-\d+)?$")


@dataclass(frozen=True)
class RunFolder:
    """Where a launch writes, and the checkpoint it starts from, if any."""

    path: Path
    checkpoint: Path | None
    continues: bool  # the checkpoint is this folder's own


def read_run(run: str, overrides: Sequence[str] = ()) -> Resolved[RunConfig]:
    """The config of RUN: a config file, or the folder of an earlier run, whose saved config is read."""
    path = Path(run)
    if path.is_dir():
        file = path / CONFIG_FILE
        if not file.exists():
            raise UserError(f"{run}: no {CONFIG_FILE} in it; give a config file, or the folder of an earlier run")
        path = file
    return load_config(path, overrides, RunConfig)


def open_folder(config: RunConfig, world: World, source: str) -> RunFolder:
    """Chooses the folder of this launch on rank 0, for all ranks, and saves the resolved config in it.

    A new launch gets a new folder. RUN being a folder continues its newest checkpoint; `resume = "auto"` that of the
    newest run of the same name that has one; both in place, with metrics after that checkpoint cut off.
    """
    outcome = None
    if world.is_main:
        try:
            outcome = _choose(config, source)
            _save_config(outcome.path, config)
        except (UserError, OSError) as error:
            outcome = error
    outcome = world.broadcast(outcome)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _choose(config: RunConfig, source: str) -> RunFolder:
    outputs, name = Path(config.outputs), run_name(config, source)
    if Path(source).is_dir() and config.load is None:
        folder = Path(source)
        checkpoint = _newest(folder)
        return RunFolder(folder, checkpoint, continues=True)
    if config.resume == "auto":
        named = [path for path in outputs.glob("*") if path.is_dir() and _bare(path.name) == _bare(name)]
        ready = [(checkpoint.stat().st_mtime, path, checkpoint) for path in named if (checkpoint := _newest(path))]
        if ready:
            _, path, checkpoint = max(ready)
            return RunFolder(path, checkpoint, continues=True)
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
    """A folder's name without its date and number."""
    return _NUMBERED.match(name)["name"]


def _newest(folder: Path) -> Path | None:
    complete = [info for info in list_checkpoints(folder) if info.complete]
    return max(complete, key=lambda info: info.step).path if complete else None


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
    temporary = folder / f".{CONFIG_FILE}.tmp"
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
