"""Which system's words a run file is written in, where its command line does not say so."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longtake.config import ConfigError, Dialect, load_config
from longtake.dialects.opensora_v1_2 import OpenSoraV12

_OF_FILES = (OpenSoraV12,)


def written_in(run: str, words: Sequence[str]) -> Dialect | None:
    """The dialect of a run file with these words behind it; None where it is in Longtake's own, and for what is no
    such file."""
    if not Path(run).is_file():
        return None
    try:
        tree = load_config(run, [], dict[str, Any]).tree
    except ConfigError:  # of which the verb tells
        return None
    return next((found for dialect in _OF_FILES if (found := dialect.of_file(tree, words)) is not None), None)
