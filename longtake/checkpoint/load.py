"""Fill tensors from a checkpoint, at any number of ranks and on any mesh.

PyTorch's distributed checkpoint finds out which saved shards overlap which local ones; safetensors maps the files.
No pickle is read: a `.metadata` file, or anything else that COMPLETE does not list, is never opened.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata

from longtake.checkpoint.folder import check_all, damage_sentence
from longtake.checkpoint.layout import first_cause
from longtake.checkpoint.runs import held
from longtake.contracts import UserError
from longtake.parallel.world import World


@dataclass(frozen=True)
class Loaded:
    """What `load_tensors` did, by name."""

    filled: tuple[str, ...]
    missing: tuple[str, ...]  # asked for, not in the checkpoint: left as they were
    surplus: tuple[str, ...]  # in a part of the checkpoint that was asked for, but not asked for


def load_tensors(
    folder: str | Path, into: Mapping[str, Tensor], strict: bool = True, checked: bool = False, convert: bool = False
) -> Loaded:
    """Fill the tensors of `into` in place from the checkpoint in `folder`. Collective: every rank calls it.

    `into`: name -> allocated tensor (plain: the whole tensor, on every rank; DTensor: this rank's shard), the same
    names on all ranks. Only the parts that occur in it are read and compared: `{"ema.…": …}` alone loads the EMA.
    `strict=False` leaves missing names as they are, passes over surplus ones and converts dtypes; the answer names
    them. `convert`: dtypes alone are converted. Shapes must always agree.

    Before the first byte is used, the ranks share out the files and compare them with their checksums, unless they
    were `checked`. Raises UserError on every rank where the folder is not a complete checkpoint of this format, is
    damaged, or does not fit.
    """
    folder = Path(folder)
    assert into, "nothing to load"
    assert not any(tensor.is_meta for tensor in into.values()), "tensors to fill must be allocated"
    with held(folder):
        if not checked and (faults := check_all(folder, World.here())):
            raise UserError(damage_sentence(folder, faults))
        reader = _ListedReader(folder)
        answer = World.here().on_all(
            lambda: _compare(folder, into, reader.read_metadata(), strict, convert or not strict)
        )
        if answer.filled:
            _read(reader, {name: into[name] for name in answer.filled})
    return answer


class _ListedReader(dcp.HuggingFaceStorageReader):
    """Reads the file headers once; DCP asks for them again."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self._metadata: Metadata | None = None

    def read_metadata(self) -> Metadata:
        """Shape, dtype and shards of every saved tensor, from the safetensors headers."""
        if self._metadata is None:
            self._metadata = super().read_metadata()
        return self._metadata


def _compare(folder: Path, into: Mapping[str, Tensor], metadata: Metadata, strict: bool, convert: bool) -> Loaded:
    """Names, shapes and dtypes of `into` against what was saved. Raises UserError with all the misfits of a kind."""
    saved = metadata.state_dict_metadata
    parts = {name.split(".")[0] for name in into}
    missing = sorted(into.keys() - saved.keys())
    surplus = sorted(name for name in saved.keys() - into.keys() if name.split(".")[0] in parts)
    filled = sorted(into.keys() & saved.keys())
    if strict and (missing or surplus):
        said = [f"has no {_some(missing)}"] * bool(missing) + [f"holds {_some(surplus)} unasked"] * bool(surplus)
        raise UserError(
            f"{folder}: {' and '.join(said)}; give the run the model and the optimizer (optim.states) it was saved from"
        )
    misfits, keep = [], "the sizes"
    for name in filled:
        was, wanted = saved[name], into[name]
        if was.size != wanted.size():
            misfits.append(f"{name} is {tuple(was.size)}, the run has {tuple(wanted.size())}")
        elif not convert and was.properties.dtype != wanted.dtype:
            misfits.append(f"{name} is {was.properties.dtype}, the run has {wanted.dtype}")
            keep = "the dtypes (master_dtype, optim.states)"
    if misfits:
        raise UserError(f"{folder}: {_some(misfits)}; give the run {keep} it was saved with")
    return Loaded(tuple(filled), tuple(missing), tuple(surplus))


def _read(reader: _ListedReader, into: dict[str, Tensor]) -> None:
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(into, storage_reader=reader, planner=planner, no_dist=World.here().size == 1)
    except CheckpointException as error:
        raise first_cause(error) from error


def _some(names: Sequence[str]) -> str:
    """Return the first few names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
