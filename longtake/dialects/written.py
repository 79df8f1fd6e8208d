"""The system whose keys a run file has, where its command line does not tell."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longtake.config.faults import ConfigError
from longtake.config.load import Dialect, load_config
from longtake.dialects.opensora_v1_2 import OpenSoraV12

_OF_FILES = (OpenSoraV12,)


def written_in(run: str, arguments: Sequence[str]) -> Dialect | None:
    """Return the dialect of a run file with these arguments; None where it has Longtake's keys, or is not a file."""
    if not Path(run).is_file():
        return None
    try:
        tree = load_config(run, [], dict[str, Any]).tree
    except ConfigError:  # of which the verb tells
        return None
    return next((found for dialect in _OF_FILES if (found := dialect.of_file(tree, arguments)) is not None), None)
