"""Checkpoints: saved by all ranks, loaded at any number of them, checked, listed, retained and exported.

`folder` is the format and its checks, `layout` deals tensors to ranks and files, `save`, `background` (with `writer`)
and `load` move them, `frozen` keeps those that are not trained, `runs` finds and retains, `contents` looks inside,
`export` takes the weights out, `agree` lets ranks fail together.
"""

from longtake.checkpoint.background import BackgroundSaver
from longtake.checkpoint.contents import Contents, PartTotal, TensorRow, inspect
from longtake.checkpoint.export import EXPORT_BYTES, INDEX_FILE, export_safetensors
from longtake.checkpoint.folder import FORMAT_VERSION, checkpoint_path, is_complete, read_state, verify
from longtake.checkpoint.frozen import keep_frozen, restore_frozen
from longtake.checkpoint.load import Loaded, load_tensors
from longtake.checkpoint.runs import CheckpointInfo, hold, list_checkpoints, resolve, retain
from longtake.checkpoint.save import save_checkpoint
from longtake.checkpoint.weights import CheckpointWeights

__all__ = [
    "EXPORT_BYTES",
    "FORMAT_VERSION",
    "INDEX_FILE",
    "BackgroundSaver",
    "CheckpointInfo",
    "CheckpointWeights",
    "Contents",
    "Loaded",
    "PartTotal",
    "TensorRow",
    "checkpoint_path",
    "export_safetensors",
    "hold",
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
