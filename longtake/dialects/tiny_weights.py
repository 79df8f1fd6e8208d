"""Weights that a command line names next to `--tiny`: existing ones are left out, and a path that is not there is an
error, as it is without `--tiny`."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path

from longtake.checkpoint.folder import is_complete
from longtake.checkpoint.runs import list_checkpoints
from longtake.config.tree import Leaf
from longtake.dialects.translation import Translation
from longtake.hub import is_hub_name, published_home
from longtake.presets import PUBLISHED

_OWNERS = {repository.partition("/")[0] for repository in PUBLISHED.values()}
_OWNERS |= {"THUDM", "DeepFloyd", "black-forest-labs", "google", "openai"}  # on the pages of the other systems
LEFT_OUT = "--tiny leaves its weights out"
NOT_THERE = "is not on this machine"
CHECK = "check the path, or leave it out"


def is_own_checkpoint(place: str) -> bool:
    """Return True where a path is a checkpoint, or the folder of a run, of Longtake."""
    folder = Path(place).expanduser()
    return folder.is_dir() and (is_complete(folder) or bool(list_checkpoints(folder)))


def is_missing(place: str) -> bool:
    """Return True where weights are neither on this machine nor known to be published under this name."""
    path = Path(place).expanduser()
    exists = path.exists() or bool(glob.glob(str(path)))
    # `folder/x/y.safetensors` may be a name on the hub too: --tiny downloads nothing, and owners of weights are few
    is_published = published_home(path) is not None or (is_hub_name(place) and path.parts[0] in _OWNERS)
    return not exists and not is_published


def leave_out_tiny_weights(work: Translation, names: Sequence[str] = ("model.from_pretrained",)) -> None:
    """Take flags that name weights of full size out of a tiny run. Checkpoints of Longtake are left to the loader:
    those of a tiny run fit."""
    for name in names:
        node = work.get(name)
        if not isinstance(node, Leaf) or not isinstance(node.value, str) or not work.is_flag(name):
            continue
        if is_missing(node.value):
            work.refuse(name, node, NOT_THERE, CHECK)
        elif not any(map(is_own_checkpoint, glob.glob(node.value))):
            work.note(name, node, LEFT_OUT)
            work.take(name)
