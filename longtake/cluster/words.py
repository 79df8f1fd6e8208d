"""What the words behind `--` say about a run, and which of our variables go to the hosts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from longtake.config import load_config
from longtake.contracts import UserError

# Settings of the libraries that a run uses. Variables that describe this machine (PATH, HOME) stay here.
_FORWARDED = re.compile(
    "(NCCL|GLOO|UCX|FI|HF|TORCH|TORCHINDUCTOR|PYTORCH|WANDB|LONGTAKE)_.+|OMP_NUM_THREADS|"
    "CUDA_(VISIBLE_DEVICES|DEVICE_MAX_CONNECTIONS|LAUNCH_BLOCKING)|TOKENIZERS_PARALLELISM"
)
_NAME = re.compile(r"[A-Za-z_]\w*")


def forwarded(ours: Mapping[str, str], asked: Sequence[str]) -> dict[str, str]:
    """The variables for the hosts: known settings among `ours`, and those asked for as `K=V`, or `K` for our value.

    Raises `UserError` for a `K` that we have no value of.
    """
    chosen = {name: value for name, value in ours.items() if _FORWARDED.fullmatch(name)}
    for words in asked:
        name, given, value = words.partition("=")
        if not _NAME.fullmatch(name):
            raise UserError(f"--env {words}: found {name!r} where a variable's name is expected; write NAME=VALUE")
        if not given and name not in ours:
            raise UserError(f"--env {name}: has no value here; write {name}=VALUE, or export it before")
        chosen[name] = value if given else ours[name]
    return chosen


def name_and_folder(words: Sequence[str], name: str | None = None) -> tuple[str, str]:
    """The name of a run, and the folder in which it would train: for `--` `train RUN --exp-name NAME --outputs DIR`.

    The name is the one given, `exp_name` of the words or of the file if it is here, or the file's own. A folder with
    the date in its name cannot be known before. What does not train has no folder, and may run beside training.
    """
    verb, run = Path(words[0]).stem, next((word for word in words[1:] if not word.startswith("-")), words[0])
    path, keys = Path(run), _keys_of(run)
    found = _value(words, "exp_name") or keys.get("exp_name")
    if path.suffix not in (".py", ".toml") and len(path.parts) > 1 and _value(words, "exp_name") is None:
        known, folder = path.name, run  # of an earlier run
    else:
        known = str(found or path.stem)
        folder = str(Path(str(_value(words, "outputs") or keys.get("outputs") or "outputs")) / known)
    if verb == "train":
        return name or known, folder
    return name or (known if run == words[0] else f"{verb} {known}"), ""


def _value(words: Sequence[str], key: str) -> str | None:
    """The value of the last `--key value` or `--key=value`, with dashes or underscores."""
    found = None
    for word, following in zip(words, [*words[1:], ""], strict=True):
        option, given, value = word.partition("=")
        if option.startswith("--") and option[2:].replace("-", "_") == key:
            found = value if given else following
    return found


def _keys_of(run: str) -> dict[str, Any]:
    """The keys of a run's file, if it is on this machine and can be read; the run tells what is wrong with it."""
    path = Path(run)
    if path.is_dir():
        path = path / "config.py"
    if not path.is_file():
        return {}
    try:
        return load_config(path, [], dict[str, Any]).tree
    except ValueError:
        return {}
