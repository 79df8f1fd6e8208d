"""Where the files that an old command line names are now."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from longtake.checkpoint.folder import parse_name
from longtake.contracts import UserError
from longtake.dialects.translation import Say
from longtake.presets import FOLDER, below_configs, opensora_v2_preset
from longtake.system.tiny import world_size

_DC_AE = "is for the high-compression autoencoder, which Longtake does not have; choose {instead}"
_PART = "is a part of run files; name the run file that has it as a base"
# Flags that name a checkpoint; a shell makes several arguments of a `*` that fits several folders.
_CHECKPOINTS = ("--load", "--model.from_pretrained", "--ckpt_path")
_TENSOR_PEERS = 8  # of 256px_tp.py


def run_file(run: str, say: Say) -> tuple[str, list[str]]:
    """Return the file that RUN means, as it is where it exists, else the preset of Open-Sora's name, and flags that
    it stands for. Raises `UserError` for one that has no counterpart."""
    path = Path(run)
    below = below_configs(path)
    if below is None or path.exists() or path.suffix != ".py":
        return run, []
    if below[:1] == ("vae",):
        raise UserError(f"{run}: trains an autoencoder, which Longtake does not do; it takes trained ones (ae)")
    if len(below) < 3 or below[0] != "diffusion":
        return run, []
    if below[-1] == "high_compression.py":
        instead = "stage1_i2v.py" if below[1] == "train" else "t2i2v_768px.py"
        raise UserError(f"{run}: {_DC_AE.format(instead=instead)}")
    if below[2] == "plugins":
        raise UserError(f"{run}: {_PART}")
    flags = list[str]()
    if below[-1] == "256px_tp.py":
        flags = ["--parallel.tensor", str(math.gcd(_TENSOR_PEERS, world_size()))]
    if (new := opensora_v2_preset(path)) is None:
        folder = FOLDER / "opensora_v2" / below[1]
        known = ", ".join(sorted(file.name for file in folder.glob("*.py")))
        raise UserError(f"{run}: does not exist, and {folder} has no {below[-1]}; there are {known or 'none'}")
    say(f"{run}: read as {' '.join([_relative(new), *flags])}")
    return _relative(new), flags


def _relative(path: Path) -> str:
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def one_word(arguments: Sequence[str], say: Say) -> list[str]:
    """Return the arguments with the checkpoint of the highest step alone, where a shell has expanded `*` to several."""
    rest, result = list(arguments), list[str]()
    while rest:
        result.append(rest.pop(0))
        if result[-1].replace("-", "_").replace("__", "--", 1) not in _CHECKPOINTS:
            continue
        count = next((i for i, word in enumerate(rest) if word.startswith("--")), len(rest))
        given, steps = rest[:count], [parse_name(Path(word).name) for word in rest[:count]]
        if count > 1 and all(steps):
            newest = max(zip(steps, given, strict=True), key=lambda pair: pair[0][::-1] if pair[0] else (0, 0))[1]
            say(f"{result[-1]}: {newest}, the newest of {count}")
            result.append(newest)
            del rest[:count]
    return result
