"""The format version that Longtake writes into its files, and the refusal of a newer one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from longtake.contracts import UserError

TABLE_VERSION = 1  # of clip tables in Parquet and Arrow files
SHARDS_VERSION = 1  # of folders of shards
FORMAT = {"longtake_format": "clip table", "longtake_format_version": str(TABLE_VERSION)}  # in Parquet and Arrow files


def check_table_format(metadata: Mapping[bytes, bytes] | None, source: Path) -> None:
    """Refuses a table of a newer format version; one without any was written by another program and is fine."""
    found = (metadata or {}).get(b"longtake_format_version")
    if found is not None:
        check_version(found.decode("utf-8", "replace"), TABLE_VERSION, source)


def check_version(found: object, known: int, source: Path) -> None:
    """Raises `UserError` where `found` is no version up to `known`."""
    text = str(found)
    if text.isdecimal() and 1 <= int(text) <= known:
        return
    raise UserError(
        f"{source}: has format version {text}, and this Longtake reads up to version {known}; "
        "install a newer Longtake, or make the file again with this one"
    )
