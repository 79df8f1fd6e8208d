"""Advisory file locks: `flock` where the system has it.

Windows has none. There `flock` raises OSError, as it does on a network file system without locks, and callers fall back
in the same way.
"""

from __future__ import annotations

import errno
from typing import IO, Any

try:
    from fcntl import LOCK_EX, LOCK_NB, LOCK_SH
    from fcntl import flock as flock
except ImportError:
    LOCK_SH, LOCK_EX, LOCK_NB = 1, 2, 4

    def flock(file: int | IO[Any], kind: int) -> None:
        """Raise OSError: this system has no such locks."""
        raise OSError(errno.ENOTSUP, "this system has no file locks")
