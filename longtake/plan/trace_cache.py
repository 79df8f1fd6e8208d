"""Keeps what a trace has found in the user's cache: importing the compiler takes longer than the rest of a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from longtake import small_files

_TRACED = ("models/*.py", "parallel/*.py", "encoders/*.py", "system/float8.py", "system/lora.py")
_TRACING = ("plan/blocks.py", "plan/block_traces.py", "plan/compiled.py", "plan/parameters.py", "plan/video.py")


def traced_before(kind: str, look: Callable[[], Any], *facts: Any) -> Any:
    """Return the result of `look`, as JSON, from the cache's folder `kind` if it ran before with these facts, this
    PyTorch and the same Longtake code."""
    facts = torch.__version__, facts, small_files.digest_of_code(*_TRACED, *_TRACING)
    return small_files.remembered(kind, look, *facts, whole=lambda _: True)
