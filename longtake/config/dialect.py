"""Other words for the keys of a schema: what a dialect is, and which of two values stands above the other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from longtake.config.faults import Fault
from longtake.config.layers import Layer
from longtake.config.tree import Branch, Origin


class Heights:
    """The layer that a value was written in, as a number: a base below the file that names it, flags above all."""

    def __init__(self, top: Layer) -> None:
        """`top`: the highest layer below the flags."""
        self._of: dict[str, int] = {}
        self._count(top)

    def _count(self, layer: Layer) -> None:
        for base in layer.bases:
            self._count(base)
        self._of[layer.source.file] = len(self._of) + 1

    def __call__(self, origin: Origin) -> int:
        """The height of what was written at a place, `file:line` or the name of a layer; of flags beyond all layers."""
        place = origin.place
        if place in self._of:
            return self._of[place]
        file, _, line = place.rpartition(":")
        return self._of[file] if line.isdecimal() and file in self._of else len(self._of) + 1

    def is_flag(self, origin: Origin) -> bool:
        """Whether a value was written on the command line."""
        return self(origin) > len(self._of)


class Dialect(Protocol):
    """The words of another system, for files, flags and layers alike."""

    def find(self, path: Path) -> Path | None:
        """Where a base is that a file names and that does not exist there; None: nowhere."""
        ...

    def translate(self, tree: Branch, heights: Heights, report: Callable[[Fault], None]) -> Branch:
        """The merged tree in the schema's own words; what has no counterpart is reported."""
        ...
