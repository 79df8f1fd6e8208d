"""RUN: the file, folder or preset that a verb or `Run` is given. Imports nothing heavy: `--help` needs it."""

from __future__ import annotations

import difflib
import shlex
from pathlib import Path

from longtake.contracts import UserError
from longtake.presets import find_preset, is_own, nearest_preset, run_file


def found_run(run: str, kind: str = "train") -> str:
    """RUN, or the file of the preset that it names. Raises `UserError` where it is a preset's name misspelt, or has no
    suffix and is nothing that there is."""
    if not is_own(run, kind) and find_preset(run, kind) is None:
        nothing = f"{run}: there is no such file, folder or preset"
        if (meant := nearest_preset(run)) is not None:
            raise UserError(f"{nothing}; did you mean the preset {meant}?")
        beside = [str(path) for path in Path(run).parent.glob("*") if path.is_dir()]
        if alike := difflib.get_close_matches(str(Path(run)), beside, n=1, cutoff=0.8):
            raise UserError(f"{nothing}; did you mean {alike[0]}?")
        if not Path(run).suffix:
            fix = "a .py or .toml file, or a run's folder" if kind == "train" else "a checkpoint or run, or 'latest'"
            raise UserError(f"{nothing}; give {fix}; `longtake preset` lists the presets")
    if kind == "train" and Path(run).exists() and Path(run).suffix not in ("", ".py", ".toml"):
        from longtake.data.tables.rows import SUFFIXES

        if Path(run).suffix in SUFFIXES:
            words = f"longtake train custom --dataset.data-path {shlex.quote(run)}"
            raise UserError(f"{run}: is a table of clips, no run; give it to a run, such as `{words}`")
    return run_file(run, kind)
