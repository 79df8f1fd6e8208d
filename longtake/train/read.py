"""The config of a run, from its file or its folder; apart from what trains, so that it is read without PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from longtake.config import Dialect, Resolved
from longtake.contracts import UserError
from longtake.train.config import RunConfig
from longtake.train.stages import CommandLine, read_curriculum, read_layers

CONFIG_FILE = "config.py"  # of a run's folder


def read_run(
    run: str, overrides: Sequence[str] = (), schema: type[RunConfig] = RunConfig, dialect: Dialect | None = None
) -> Resolved[RunConfig]:
    """The config of RUN: a config file, or the folder of an earlier run, whose saved config is read.

    Two words of `overrides` are no keys: `--tiny`, and `--stage NAME` where the file has stages. `schema`: checks less
    than `RunConfig` where no model is built. `dialect`: the words that RUN and `overrides` are written in.
    """
    path, command = Path(run), CommandLine.read(overrides, dialect)
    if (curriculum := read_curriculum(run, dialect)) is not None:
        return curriculum.resolve(curriculum.stage(command.stage), command, schema)
    if command.stage is not None:
        raise UserError(f"--stage {command.stage}: {run} has no stages; leave it out")
    if path.is_dir():
        file = path / CONFIG_FILE
        if not file.exists():
            if inner := sorted(one.parent.name for one in path.glob(f"*/{CONFIG_FILE}")):
                raise UserError(
                    f"{run}: holds the runs {', '.join(inner)}; give the file with the stages, or one of the folders"
                )
            raise UserError(f"{run}: no {CONFIG_FILE} in it; give a config file, or the folder of an earlier run")
        path = file
    return read_layers(path, command, schema)
