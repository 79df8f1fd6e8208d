"""Checkpoints: saved by all ranks, loaded at any number of them, checked, listed, retained and exported.

`folder` is the format and its checks, `state` what is kept beside tensors, `layout` deals tensors to ranks and files,
`save`, `background` (with `writer`) and `load` move them, `frozen` keeps those that are not trained, `runs` finds and
retains, `leases` keep what others read, `contents` looks inside, `export` takes the weights out.
"""

from typing import TYPE_CHECKING

from longtake.lazy import lazy_exports

if TYPE_CHECKING:
    from longtake.checkpoint.background import BackgroundSaver
    from longtake.checkpoint.contents import inspect
    from longtake.checkpoint.export import CheckpointWeights
    from longtake.checkpoint.folder import checkpoint_path, glance, is_complete, read_state, verify
    from longtake.checkpoint.frozen import keep_frozen, restore_frozen
    from longtake.checkpoint.leases import leased
    from longtake.checkpoint.load import load_tensors
    from longtake.checkpoint.runs import (
        CheckpointInfo,
        held,
        hold,
        last_whole,
        list_checkpoints,
        resolve,
        retain,
        set_aside,
    )
    from longtake.checkpoint.save import save_checkpoint, size_of
    from longtake.checkpoint.state import Clock, Frozen, RunState, Samples, SlotSizes

__getattr__ = lazy_exports(__name__)
