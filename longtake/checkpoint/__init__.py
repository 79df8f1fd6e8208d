"""Checkpoints: saved by all ranks, loaded at any number of them, checked, listed, retained and exported.

`folder` is the format and its checks, `layout` deals tensors to ranks and files, `save`, `background` (with `writer`)
and `load` move them, `frozen` keeps those that are not trained, `runs` finds and retains, `contents` looks inside,
`agree` lets ranks fail together.
"""

from longtake.checkpoint.background import BackgroundSaver
from longtake.checkpoint.contents import Contents, PartTotal, TensorRow, export_safetensors, inspect
from longtake.checkpoint.folder import FORMAT_VERSION, checkpoint_path, is_complete, read_state, verify
from longtake.checkpoint.frozen import keep_frozen, restore_frozen
from longtake.checkpoint.load import Loaded, load_tensors
from longtake.checkpoint.runs import CheckpointInfo, list_checkpoints, resolve, retain
from longtake.checkpoint.save import save_checkpoint

__all__ = [
    "FORMAT_VERSION",
    "BackgroundSaver",
    "CheckpointInfo",
    "Contents",
    "Loaded",
    "PartTotal",
    "TensorRow",
    "checkpoint_path",
    "export_safetensors",
    "inspect",
    "is_complete",
    "keep_frozen",
    "list_checkpoints",
    "load_tensors",
    "read_state",
    "resolve",
    "restore_frozen",
    "retain",
    "save_checkpoint",
    "verify",
]
