"""Checkpoints: saved by all ranks, loaded at any number of them, checked, listed, retained and exported.

`folder` is the format and its checks, `save` and `load` move tensors, `runs` finds and retains, `contents` looks
inside, `agree` lets ranks fail together.
"""

from longtake.checkpoint.contents import Contents, PartTotal, TensorRow, export_safetensors, inspect
from longtake.checkpoint.folder import FORMAT_VERSION, checkpoint_path, is_complete, read_state, verify
from longtake.checkpoint.load import Loaded, load_tensors
from longtake.checkpoint.runs import CheckpointInfo, list_checkpoints, resolve, retain
from longtake.checkpoint.save import save_checkpoint

__all__ = [
    "FORMAT_VERSION",
    "CheckpointInfo",
    "Contents",
    "Loaded",
    "PartTotal",
    "TensorRow",
    "checkpoint_path",
    "export_safetensors",
    "inspect",
    "is_complete",
    "list_checkpoints",
    "load_tensors",
    "read_state",
    "resolve",
    "retain",
    "save_checkpoint",
    "verify",
]
