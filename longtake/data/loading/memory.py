"""How much memory there is."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def machine_bytes() -> int:
    """The memory of this machine, or of the container that the process runs in, where that has less."""
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for file in _CGROUP_LIMITS:
        with suppress(OSError, ValueError):  # no such file, or "max"
            found = min(found, int(Path(file).read_text(encoding="ascii")))
    return found
