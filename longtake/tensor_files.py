"""The bytes of a safetensors file, for writers that have one tensor at a time in memory; a check for readers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

import safetensors.torch
import torch
from torch import Tensor

from longtake.contracts import UserError

_DTYPES = {dtype: name for name, dtype in safetensors.torch._TYPES.items()}


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the tensor's bytes, uint8 [num_bytes], in row-major order; shares memory where it can."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def safetensors_head(rows: Iterable[tuple[str, torch.dtype, Sequence[int]]], metadata: Mapping[str, str]) -> bytes:
    """Return the head of a safetensors file: its length in 8 bytes, then JSON padded with blanks to a multiple of 8.

    `rows`: name, dtype and shape of each tensor, in the order of their bytes. Raises TypeError for other dtypes.
    """
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, dtype, shape in rows:
        if dtype not in _DTYPES:
            raise TypeError(f"{name}: {dtype} has no place in a safetensors file")
        end = offset + torch.Size(shape).numel() * dtype.itemsize
        entries[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def check_finite(tensor: Tensor, place: str, name: str) -> None:
    """Raise `UserError` where a tensor holds NaN or infinity, or is infinite in float32."""
    if not tensor.is_floating_point() or not tensor.numel():
        return
    values = tensor if tensor.dtype.itemsize > 1 else tensor.float()
    # min and max take a twentieth of isfinite's time, and are NaN where a value is
    if torch.isfinite(torch.stack(values.aminmax()).float()).all():
        return
    num_bad = tensor.numel() - int(torch.isfinite(tensor.float()).sum())
    raise UserError(
        f"{place}: {name} holds {num_bad:,} values that are NaN or infinite; copy the file again, or give an earlier "
        "checkpoint"
    )
