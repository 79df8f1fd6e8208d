"""Consecutive items dealt out by their sizes: files of a checkpoint, pieces of an optimizer's state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def chunked(sizes: Sequence[int], limit: int) -> Iterator[range]:
    """Ranges of consecutive items whose sizes make up to `limit` together; a larger item is alone."""
    start, filled = 0, 0
    for number, size in enumerate(sizes):
        if number > start and filled + size > limit:
            yield range(start, number)
            start, filled = number, 0
        filled += size
    if start < len(sizes):
        yield range(start, len(sizes))
