"""Tables of another system's keys: each row says what becomes of one key here.

`apply_rows` translates a run by a table; `tools/migrating_tables.py` writes the same table to docs/migrating.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

from longtake.config.faults import shown
from longtake.config.tree import Leaf, Node, plain
from longtake.contracts import UserError
from longtake.dialects.command_line import MANY
from longtake.dialects.translation import Translation

UNSET: Any = object()  # no value; None is one
_ARITIES = {"nothing": 0, "value": 1, "text": 1, "truth": 1, "two": 2, "list": MANY}


@dataclass(frozen=True)
class KeyRow:
    """One key of another system, and its answer: Longtake's key, a fixed value, a note, or a conversion in code.

    A row with none of `ours`, `only` and `note` documents a key that code converts, or that Longtake reads as it is.
    """

    key: str
    _: KW_ONLY
    ours: str = ""  # Longtake's key, which takes the value
    values: Mapping[Any, Any] | None = None  # value there -> value here; others are refused, UNSET writes nothing
    on: Any = UNSET  # value here of a switch that is on; one that is off writes nothing
    convert: Callable[[Any], Any] | None = None  # from the value there to the value here
    ignored: Sequence[Any] = ()  # values that count as not given
    least: int | None = None  # smaller numbers are refused
    only: Sequence[Any] = ()  # the values that mean what Longtake does; others are refused
    reason: str = ""  # why other values are refused, or what to write instead
    note: str = ""  # printed where the key is given: what Longtake does instead
    beats_ours: bool = False  # in a file, wins over `ours` in the same file
    docs: str = ""  # cell of docs/migrating.md, where the fields above do not say it all
    # of systems with a fixed list of flags
    default: Any = UNSET  # value where the key is not given
    takes: Literal["nothing", "value", "text", "truth", "two", "list"] = "value"  # arguments of the flag
    scripts: Sequence[str] = ()  # scripts that have the flag; empty: all

    @property
    def is_translated(self) -> bool:
        """True where `apply_rows` translates the key, False where code does."""
        return bool(self.ours or self.only or self.note)


def keys_of(rows: Iterable[KeyRow], script: str = "") -> list[str]:
    """Keys of a table; of one script where it is named."""
    return [row.key for row in rows if not script or not row.scripts or script in row.scripts]


def arities_of(rows: Iterable[KeyRow]) -> dict[str, int]:
    """Key -> most arguments of its flag."""
    return {row.key: _ARITIES[row.takes] for row in rows}


def refuse_bare(given: Mapping[str, Sequence[str]], rows: Mapping[str, KeyRow]) -> None:
    """Raise `UserError` for the first flag that has fewer arguments than it takes. rows: by the names of `given`."""
    for name, values in given.items():
        row = rows[name]
        may_be_alone = row.takes == "nothing" or isinstance(row.default, bool)
        least = 0 if may_be_alone else 2 if row.takes == "two" else 1
        if len(values) < least:
            text = " ".join(f"VALUE{number}" for number in range(1, 3)) if least == 2 else "VALUE"
            raise UserError(f"--{name}: needs {'two values' if least == 2 else 'a value'}; write --{name} {text}")


def lay_defaults(work: Translation, rows: Iterable[KeyRow]) -> None:
    """Lay the other system's defaults beneath all that is written."""
    for row in rows:
        if row.default is not UNSET:
            work.lay(row.key, row.default)


def apply_rows(work: Translation, rows: Iterable[KeyRow]) -> None:
    """Translate the keys of a table, in its order."""
    for row in rows:
        node = work.get(row.key)
        if node is None:
            continue
        value = plain(node)
        if _is_in(value, row.ignored):
            if row.is_translated:
                work.take(row.key)
            continue
        if row.least is not None and isinstance(value, (int, float)) and value < row.least:
            work.refuse(row.key, node, f"must be {row.least} or more")
        if row.is_translated and row.ours != row.key:
            work.take(row.key)
            _translate(work, row, node)


def _translate(work: Translation, row: KeyRow, node: Node) -> None:
    value = plain(node)
    # refuse values that have no counterpart
    if row.only and not _is_in(value, row.only):
        work.refuse(row.key, node, f"must be {' or '.join(map(shown, row.only))} here", row.reason)
        return
    if row.values is not None and not _is_in(value, row.values):
        work.refuse(row.key, node, f"must be one of {', '.join(map(str, row.values))}", row.reason)
        return
    # write Longtake's key
    if row.on is not UNSET:
        if not value:
            return
        work.put(row.ours, row.on, node)
    elif row.ours:
        is_silent = row.beats_ours and not work.heights.is_flag(node.origin)
        _put(work, row, node, "" if is_silent else row.key)
    # name what Longtake does instead
    if row.note and value is not None and row.key not in work.laid:
        work.note(row.key, node, row.note)


def _put(work: Translation, row: KeyRow, node: Node, named_as: str) -> None:
    is_section = row.key.startswith(f"{row.ours}.")  # what stands under `ours` is the other system's section
    if row.key in work.laid and work.is_given(row.ours) and not is_section:
        return  # a default yields to what is written
    value = plain(node)
    if row.values is not None:
        value = row.values[value]
    if row.convert is not None:
        value = row.convert(value)
    if value is not UNSET:
        work.put(row.ours, value, node, named_as)


def _is_in(value: Any, allowed: Iterable[Any]) -> bool:
    """Return True where a value is one of those allowed; True is not 1, and 1 is not 1.0."""
    return any(value == one and type(value) is type(one) for one in allowed)


def refuse_rest(work: Translation, section: str, rows: Iterable[KeyRow]) -> None:
    """Report every key that is left in a section which Longtake does not have."""
    known = [row.key.removeprefix(f"{section}.") for row in rows if row.key.startswith(f"{section}.")]
    if (node := work.take(section)) is None or plain(node) is None:
        return
    if isinstance(node, Leaf):
        work.refuse(section, node, "must be a dict", "write dict(key=value)")
        return
    for key, item in node.items.items():
        work.refuse(f"{section}.{key}", item, "unknown key", f"choose {', '.join(known)}")
