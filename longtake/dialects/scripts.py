"""The scripts of other systems, as Longtake has them: which dialect each speaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import longtake
from longtake.config.load import Dialect
from longtake.dialects.cogvideox_fun import CogVideoXFun
from longtake.dialects.cogvideox_fun.keys import SCRIPTS
from longtake.dialects.opensora_v1_2 import OpenSoraV12
from longtake.dialects.opensora_v2 import OpenSora
from longtake.dialects.translation import Say
from longtake.dialects.ttt_video import TTTVideoDialect

_ROOT = Path(longtake.__file__).parents[1]
_OF_TRAINING: dict[str, Callable[[Say], Any]] = {  # by place in the repository
    "scripts/diffusion/train.py": OpenSora,
    "scripts/train.py": OpenSoraV12,
    "train.py": TTTVideoDialect,
    **{f"scripts/cogvideox_fun/{name}.py": partial(CogVideoXFun, name) for name in SCRIPTS},
}


def script_run(arguments: Sequence[str]) -> tuple[str, list[str], Dialect] | None:
    """RUN, overrides and dialect of a command line that starts with a script of training; None for another program.
    Raises `UserError`."""
    place = Path(arguments[0]).resolve()
    if not place.is_relative_to(_ROOT) or (of := _OF_TRAINING.get(str(place.relative_to(_ROOT)))) is None:
        return None
    dialect = of(lambda line: None)  # the processes print their notes
    _, run, *overrides = dialect.command(["train", *arguments[1:]])
    return run, overrides, dialect
