"""Longtake trains video diffusion transformers. `docs/` has one page per task; packages follow the way of a clip.

The Python API is provisional (docs/python.md). Its names are imported when they are first used:

    import longtake

    table = longtake.probe("clips/", "clips.parquet")
    run = longtake.Run.preset("custom").set({"dataset.data_path": table.path}, tiny=True)
    trained = run.train()
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from longtake._version import __version__

if TYPE_CHECKING:
    from longtake.api.epochs import batches as batches
    from longtake.api.models import Model as Model
    from longtake.api.models import load as load
    from longtake.api.plans import Plan as Plan
    from longtake.api.runs import Run as Run
    from longtake.api.tables import Table as Table
    from longtake.api.tables import probe as probe
    from longtake.contracts import Batch as Batch
    from longtake.contracts import UserError as Error

_PLACES = {
    "Batch": ("longtake.contracts", "Batch"),
    "Error": ("longtake.contracts", "UserError"),
    "Model": ("longtake.api.models", "Model"),
    "Plan": ("longtake.api.plans", "Plan"),
    "Run": ("longtake.api.runs", "Run"),
    "Table": ("longtake.api.tables", "Table"),
    "batches": ("longtake.api.epochs", "batches"),
    "load": ("longtake.api.models", "load"),
    "probe": ("longtake.api.tables", "probe"),
}
__all__ = ["Batch", "Error", "Model", "Plan", "Run", "Table", "__version__", "batches", "load", "probe"]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'longtake' has no attribute {name!r}")
    module, attribute = _PLACES[name]
    value = getattr(import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
