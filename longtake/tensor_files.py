"""The bytes of a safetensors file, for writers that have one tensor at a time in memory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

import safetensors.torch
import torch
from torch import Tensor

_DTYPES = {dtype: name for name, dtype in safetensors.torch._TYPES.items()}


def bytes_of(tensor: Tensor) -> Tensor:
    """The tensor's bytes, uint8 [num_bytes], in row-major order; shares memory where it can."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def safetensors_head(rows: Iterable[tuple[str, torch.dtype, Sequence[int]]], metadata: Mapping[str, str]) -> bytes:
    """The head of a safetensors file: its length in 8 bytes, then JSON padded with blanks to a multiple of 8.

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
