"""The condition of a filter: one SQL expression over the columns of a row, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from longtake.contracts import UserError

_EXAMPLE = "resolution >= 65536 AND fps > 8"


def check_condition(where: str, source: Path, names: Sequence[str]) -> None:
    """Raises `UserError` where `where` is empty, not SQL, more than one expression, or asks about other rows.

    DuckDB reads it twice, alone and in brackets; only for one complete expression do both mean the same. `source` and
    its columns `names` are named in errors. Columns and kinds are not looked at.
    """
    columns = f"the columns of {source} are {', '.join(names)}"
    if not where.strip():
        raise UserError(f"--where is empty; write a condition such as {_EXAMPLE!r}; {columns}")
    alone, bracketed = (_tree(f"SELECT * FROM clips WHERE {text}") for text in (f"\n{where}\n", f"(\n{where}\n)"))
    for tree in (bracketed, alone):
        if tree["error"]:
            said = " ".join(tree["error_message"].split())
            raise UserError(f"--where {where!r}: {said}; write one condition such as {_EXAMPLE!r}; {columns}")
    if _without_places(alone) != _without_places(bracketed):
        raise UserError(f"--where {where!r}: is more than a condition; write one such as {_EXAMPLE!r}; {columns}")
    if any(node.get("class") == "SUBQUERY" for node in _nodes(alone)):
        raise UserError(
            f"--where {where!r}: has a SELECT in it; a condition looks at one row at a time, such as {_EXAMPLE!r}"
        )


def _tree(statement: str) -> dict[str, Any]:
    """What DuckDB's parser makes of a statement."""
    import duckdb

    with duckdb.connect(config={"threads": 1, "enable_external_access": False}) as connection:
        found = connection.execute("SELECT json_serialize_sql(?)", [statement]).fetchone()
    assert found is not None
    return json.loads(found[0])


def _without_places(tree: Any) -> Any:
    """The tree without the positions in the text."""
    if isinstance(tree, dict):
        return {key: _without_places(part) for key, part in tree.items() if not key.startswith("query_location")}
    return [_without_places(part) for part in tree] if isinstance(tree, list) else tree


def _nodes(tree: Any) -> Iterator[dict[str, Any]]:
    if isinstance(tree, dict):
        yield tree
    for part in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from _nodes(part)
