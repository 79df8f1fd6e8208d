"""Run files: `read_run` gives the config of one run, from its file, a stage of it, or its folder; `read_curriculum` the
stages of a file that makes several runs, each from the weights of the one before. All is read without PyTorch.

    stages = [
        dict(name="image", run="image.py", max_steps=1000),
        dict(name="video", run="stage1.py", lr=3e-5, max_steps=5000),
    ]

The keys of a stage override those of the file that has `stages`, which override those of the file it names as `run`, if
any; flags override all. `longtake.train.curriculum` runs them.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from longtake.config.faults import ConfigError, Fault, shown
from longtake.config.load import Dialect, Resolved, key_names, load_config, resolve
from longtake.config.overrides import split_flags
from longtake.contracts import UserError
from longtake.encoders.autoencoder_config import AUTOENCODER_FILE, fitted_layer
from longtake.generate.config import GenerateConfig
from longtake.generate.read import OF_TRAINING
from longtake.presets import find_preset
from longtake.system.tiny import TINY, take_tiny, tiny_layer, world_size
from longtake.track.trackers import require_wandb_login
from longtake.train.config import RunConfig

T = TypeVar("T")
STAGES, STAGE = "stages", "--stage"
BUCKETS = "bucket_config"
CONFIG_FILE = "config.py"  # of a run's folder
# Keys that no run file of training has, but for those that are easily written in place of a run's own.
_OF_GENERATION = GenerateConfig.model_fields.keys() - RunConfig.model_fields.keys() - {"batch_size", "ema"}
Layers = Sequence[tuple[str, Mapping[str, Any]]]


@dataclass(frozen=True)
class CommandLine:
    """The command line after RUN: overrides of keys, and the two flags that are no keys."""

    overrides: tuple[str, ...]
    tiny: bool = False
    stage: str | None = None
    dialect: Dialect | None = None  # that RUN and the command line are written in

    @classmethod
    def read(cls, words: Sequence[str], dialect: Dialect | None = None) -> CommandLine:
        """Raise `UserError` where `--stage` has no name."""
        rest: list[str] = []
        words, tiny = take_tiny(words)
        stage, waiting = None, iter(words)
        for word in waiting:
            if word == STAGE:
                stage = next(waiting, None)
                if stage is None or stage.startswith("--"):
                    raise UserError(f"{STAGE}: found {stage or 'nothing'} where the name of a stage is expected")
            elif word.startswith(f"{STAGE}="):
                stage = word.removeprefix(f"{STAGE}=")
            else:
                rest.append(word)
        return cls(tuple(rest), tiny, stage, dialect)


@dataclass(frozen=True)
class Stage:
    """One run of a curriculum."""

    name: str
    number: int  # from 0; part of every random key of the stage
    run: Path | None  # the file below it
    keys: Mapping[str, Any]  # its own

    @property
    def names_weights(self) -> bool:
        """True if it names the weights it starts from."""
        model = self.keys.get("model")
        return isinstance(model, Mapping) and "from_pretrained" in model


@dataclass(frozen=True)
class Curriculum:
    """A run file with stages."""

    path: Path
    shared: Mapping[str, Any]  # the keys of the file; `exp_name` is always there
    stages: tuple[Stage, ...]

    def stage(self, name: str | None) -> Stage:
        """Return the stage of a name. Raises `UserError` where there is none, or no name."""
        found = [stage for stage in self.stages if stage.name == name]
        if not found:
            names = ", ".join(stage.name for stage in self.stages)
            said = f"{STAGE} {name}: is no stage of {self.path}" if name else f"{self.path}: has stages"
            raise UserError(f"{said}; write {STAGE} and one of {names}")
        return found[0]

    def resolve(self, stage: Stage, command: CommandLine, schema: type[T]) -> Resolved[T]:
        """Return the config of one stage. Raises `ConfigError`."""
        keys = {"stage_number": stage.number, **stage.keys}
        over = [(str(self.path), self.shared), (f"stage {stage.name} of {self.path}", keys)]
        if stage.run is not None:
            return read_layers(stage.run, command, schema, over)
        return read_layers(self.shared, command, schema, over)


def read_layers(
    base: Path | Mapping[str, Any], command: CommandLine, schema: type[T], over: Layers = ()
) -> Resolved[T]:
    """Return the config of a run file, or of the keys of one, with layers and flags that override it. Raises
    `ConfigError`."""

    def read(overrides: Sequence[str], schema: type[Any], over: Layers) -> Resolved[Any]:
        if isinstance(base, Path):
            return load_config(base, overrides, schema, over, command.dialect)
        return resolve(base, overrides, schema, over=over, dialect=command.dialect)

    overrides = command.overrides
    if command.tiny:
        tree = read([], dict[str, Any], over).tree
        tables, rest = _tables_of_buckets(overrides)
        if tables and isinstance(table := read(tables, dict[str, Any], over).tree[BUCKETS], Mapping):
            tree, overrides = {**tree, BUCKETS: table}, rest  # a table is made small wherever it stands
        over = (*over, (TINY, tiny_layer(tree, world_size())))
    resolved = read(overrides, schema, over)
    _refuse_idle_rates(resolved)
    return resolved


def _tables_of_buckets(words: Sequence[str]) -> tuple[list[str], Sequence[str]]:
    """Return the flags of a command line that say `bucket_config`, and all others; none where it has faults."""
    faults: list[Fault] = []
    flags = split_flags(words, faults.append)
    parts: tuple[list[str], list[str]] = ([], [])
    for flag in flags:
        parts[flag.path[0] != BUCKETS].append(flag.place if flag.text is None else f"{flag.place}={flag.text}")
    return parts if parts[0] and not faults else ([], words)


def _refuse_idle_rates(resolved: Resolved[Any]) -> None:
    """Raise `ConfigError` for `--lr` or `--eps` where the optimizer's own key has another value, which wins."""
    faults = []
    for name in ("lr", "eps"):
        flag, own = resolved.origins.get(name), resolved.origins.get(f"optim.{name}")
        if flag is None or own is None or not flag.is_flag or (name, flag.place) in own.sources:
            continue
        given, counts = resolved.tree[name], resolved.tree["optim"][name]
        if counts is not None and counts != given:
            rule = f"counts in place of {flag} {given}, which says another thing"
            fix = "keep one of the two" if own.is_flag else f"write --optim.{name} {given}"
            faults.append(Fault(str(own), shown(counts), rule, fix, f"optim.{name}"))
    if faults:
        raise ConfigError(faults)


def keys_of_generation(path: Path, dialect: Dialect | None = None) -> frozenset[str]:
    """Return the keys by which a file is a run file of `longtake generate`; empty for one of training."""
    names = key_names(path, dialect)
    return frozenset() if names & OF_TRAINING else names & _OF_GENERATION


def read_curriculum(run: str, dialect: Dialect | None = None) -> Curriculum | None:
    """Return the stages of RUN; None where it has none. Raises `ConfigError`, and `UserError` for stages that are
    none and for a run file of `longtake generate`."""
    path = Path(run)
    if not path.is_file():
        return None
    if of_generation := keys_of_generation(path, dialect):  # its every key would be refused by itself
        raise UserError(
            f"{path}: has {min(of_generation)}, so it is a run file of `longtake generate {shlex.quote(str(path))}`; "
            "give one of training, such as a preset (`longtake preset` lists them), or the folder of an earlier run"
        )
    tree = load_config(path, [], dict[str, Any], dialect=dialect).marked
    if STAGES not in tree:
        return None
    written = tree.pop(STAGES)
    place = f"{path}: {STAGES}"
    if not isinstance(written, (list, tuple)) or not written:
        raise UserError(f'{place} = {written!r}: a list is expected, as in [dict(name="image", run="image.py")]')
    stages = tuple(_stage(entry, number, path, f"{place}[{number}]") for number, entry in enumerate(written))
    names = [stage.name for stage in stages]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{place}: two stages are called {twice[0]}; give each a name of its own")
    return Curriculum(path, {"exp_name": path.stem, **tree}, stages)


def words_of_stages(run: str, overrides: Sequence[str], dialect: Dialect | None = None) -> list[list[str]]:
    """Return the overrides of each stage of RUN: those given with `--stage NAME` behind them, or alone where it has
    no stages or one is chosen."""
    command, curriculum = CommandLine.read(overrides), read_curriculum(run, dialect)
    if curriculum is None or command.stage is not None:
        return [list(overrides)]
    return [[*overrides, STAGE, stage.name] for stage in curriculum.stages]


def require_startable(run: str, overrides: Sequence[str], dialect: Dialect | None = None) -> None:
    """Check before a job is queued what would end it at its start: the config of RUN, or of each of its stages, and the
    login to Weights & Biases. Raises `UserError`."""
    for words in words_of_stages(run, overrides, dialect):
        require_wandb_login(read_run(run, words, dialect=dialect).value)


def _stage(entry: Any, number: int, path: Path, place: str) -> Stage:
    if not isinstance(entry, Mapping):
        raise UserError(f'{place} = {entry!r}: a dict is expected, as in dict(name="image", run="image.py")')
    keys = dict(entry)
    name, run = keys.pop("name", None), keys.pop("run", None)
    if not isinstance(name, str) or not name or "/" in name or name.startswith((".", "-")):
        raise UserError(f'{place}.name = {name!r}: must be a plain folder name, such as "image"')
    if run is None:
        return Stage(name, number, None, keys)
    beside = path.parent / str(run)
    file = beside if beside.is_file() else find_preset(str(run))
    if file is None:
        raise UserError(f"{place}.run = {run!r}: no such file; name one relative to {path}, or a preset")
    return Stage(name, number, file, keys)


def read_run(
    run: str, overrides: Sequence[str] = (), schema: type[RunConfig] = RunConfig, dialect: Dialect | None = None
) -> Resolved[RunConfig]:
    """Return the config of RUN: a config file, or the folder of an earlier run, whose saved config is read.

    Two words of `overrides` are no keys: `--tiny`, and `--stage NAME` where the file has stages. `schema`: checks less
    than `RunConfig` where no model is built. `dialect`: the words that RUN and `overrides` are written in.
    """
    path, command, over = Path(run), CommandLine.read(overrides, dialect), ()
    if (curriculum := read_curriculum(run, dialect)) is not None:
        return curriculum.resolve(curriculum.stage(command.stage), command, schema)
    if command.stage is not None:
        raise UserError(f"--stage {command.stage}: {run} has no stages; leave it out")
    if path.is_dir():
        file = path / CONFIG_FILE
        if not file.exists():
            if inner := sorted(one.parent.name for one in path.glob(f"*/{CONFIG_FILE}")):
                raise UserError(
                    f"{run}: holds the runs {', '.join(inner)}; give one of these folders, such as "
                    f"{path / inner[-1]}, or to `longtake train` the file with the stages"
                )
            raise UserError(
                f"{run}: no {CONFIG_FILE} in it; give a config file, or the folder of an earlier run; a folder of "
                f"clips is given to a run, such as `longtake train custom --dataset.data-path {shlex.quote(run)}`"
            )
        over = _folder_layers(file, command)
        path = file
    return read_layers(path, command, schema, over)


def _folder_layers(file: Path, command: CommandLine) -> Layers:
    """Return the keys that the config in a run's folder leaves to the folder, unless the command line chooses another
    `ae`."""
    if any(word.split("=")[0] in ("--ae", "--ae.type") for word in command.overrides):
        return ()
    keys = fitted_layer(load_config(file, [], dict[str, Any]).tree, file.parent)
    return ((str(file.parent / AUTOENCODER_FILE), keys),) if keys else ()
