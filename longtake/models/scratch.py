"""Memory that custom operators allocate and free inside: a trace, which sees their results alone, adds it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SCRATCH: dict[Any, Callable[..., int]] = {}  # operator -> bytes, from its arguments
