"""The order of a pass in files: planned by one process of a machine, read by the others through memory maps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from longtake.buckets.order import OrderInputs, PassOrder

_ARRAYS = ("slot_bucket", "keys", "order")
_COPIES = ("ids", "rows")  # present where some clip has not exactly one copy
_SMALL = ("pass_index", "report", "eras", "window", "window_start", "position", "bounds")


def write_order(order: PassOrder, folder: Path) -> None:
    """Writes the arrays of an order into an existing folder: about 13 bytes a sample (29 where clips have copies)."""
    names = _ARRAYS if order.rows is None else _ARRAYS + _COPIES
    for name in names:
        np.save(folder / f"{name}.npy", getattr(order, name))


def order_summary(order: PassOrder) -> dict[str, Any]:
    """Everything else of an order, small and fit to be sent to other processes."""
    return {name: getattr(order, name) for name in _SMALL} | {"copies": order.rows is not None}


def open_order(inputs: OrderInputs, summary: Mapping[str, Any], folder: Path) -> PassOrder:
    """The order that `write_order` and `order_summary` describe; its arrays stay on disk, shared by all readers.

    `inputs`: those the order was planned from. The files may be removed once every process has opened them.
    """
    arrays = {name: _mapped(folder / f"{name}.npy") for name in _ARRAYS + _COPIES * summary["copies"]}
    if not summary["copies"]:
        arrays |= {"ids": np.asarray(inputs.clip_ids, np.uint64), "rows": None}
    return PassOrder(inputs, **{name: summary[name] for name in _SMALL}, **arrays)


def _mapped(path: Path) -> np.ndarray:
    """An array read page by page; one without entries cannot be mapped and is read whole."""
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError:
        return np.load(path, allow_pickle=False)
