"""Write the tables of docs/migrating.md from those of longtake/dialects.

python tools/migrating_tables.py            write them
python tools/migrating_tables.py --check    exit 1 if the page is not what would be written

A table goes between the lines `<!-- keys: NAME -->` and `<!-- end -->`; the rest of the page is written by hand.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from generated_page import write_or_check

from longtake.config.faults import shown
from longtake.dialects.cogvideox_fun import keys as cogvideox_fun
from longtake.dialects.opensora_v1_2 import keys as opensora_v1_2
from longtake.dialects.opensora_v2 import keys as opensora_v2
from longtake.dialects.table import UNSET, KeyRow
from longtake.dialects.ttt_video import keys as ttt_video

PAGE = Path(__file__).parent.parent / "docs" / "migrating.md"
FLAGS = (*opensora_v1_2.FLAGS, *opensora_v1_2.TRAINING_FLAGS)
TABLES: Mapping[str, tuple[KeyRow, ...]] = {
    "opensora_v2 training": (
        *opensora_v2.PLUGIN,
        *opensora_v2.MODEL[:2],
        *opensora_v2.ADAPTERS[:-1],
        *opensora_v2.TRAINING,
    ),
    "opensora_v2 inference": (opensora_v2.MODEL[-1], opensora_v2.ADAPTERS[-1], *opensora_v2.INFERENCE),
    "cogvideox_fun": cogvideox_fun.ROWS,
    "ttt_video training": (*ttt_video.MODEL, *ttt_video.TRAINING, *ttt_video.WANDB),
    "ttt_video sampling": (*ttt_video.SAMPLING, *ttt_video.ENCODERS),
    "opensora_v1_2 flags": FLAGS,
    "opensora_v1_2 training": opensora_v1_2.TRAINING,
    "opensora_v1_2 parts": opensora_v1_2.PARTS,
    "opensora_v1_2 inference": opensora_v1_2.INFERENCE,
    "opensora_v1_2 search": opensora_v1_2.SEARCH,
}
KEY = re.compile(r"(?<![\w/.])(?:--[a-z][\w-]*|[a-z]\w*(?:\.[a-z]\w*)+|[a-z0-9]+_\w+)")  # `--a-b`, `a.b`, `a_b`
SPAN = re.compile(r"<!-- keys: (.+?) -->\n.*?<!-- end -->", re.DOTALL)


def page(text: str) -> str:
    """The page with every table as the dialects have it. Raises ValueError if it lacks one, or names another."""
    names = [match[1] for match in SPAN.finditer(text)]
    if sorted(names) != sorted(TABLES):
        raise ValueError(f"{PAGE}: expected one place for each of {', '.join(TABLES)}; found {', '.join(names)}")
    return SPAN.sub(lambda match: f"<!-- keys: {match[1]} -->\n\n{table(TABLES[match[1]])}\n\n<!-- end -->", text)


def table(rows: Iterable[KeyRow]) -> str:
    """A Markdown table; neighbours with the same answer share a line."""
    lines: list[tuple[list[str], str]] = []
    for row in rows:
        if lines and lines[-1][1] == cell(row):
            lines[-1][0].append(name(row))
        else:
            lines.append(([name(row)], cell(row)))
    return "\n".join(["| there | here |", "|---|---|", *(f"| {', '.join(names)} | {text} |" for names, text in lines)])


def name(row: KeyRow) -> str:
    """The key as one writes it, with its default there in brackets; flags alone have dashes."""
    if row.default is UNSET or row.default is None or row.default is False:
        return flag_or_key(row)
    return f"{flag_or_key(row)} ({code(row.default)})"


def flag_or_key(row: KeyRow) -> str:
    return f"`--{row.key}`" if any(row is flag for flag in FLAGS) else f"`{row.key}`"


def cell(row: KeyRow) -> str:
    """The answer to a key, in a few words."""
    if row.docs:
        return row.docs
    if row.only:
        return marked(only(row))
    if not row.ours:
        return marked(row.note if row.note.startswith("not needed") else f"not needed: {row.note}")
    if row.on is not UNSET:
        return f"`{row.ours} = {shown(row.on)}`"
    if row.ours == row.key:
        return "the same; None is the default"
    if row.values is None:
        return f"`{row.ours}`"
    pairs = (f"`{there}` is {code(here)}" for there, here in row.values.items() if here is not UNSET)
    return f"`{row.ours}`: {', '.join(pairs)}; others are refused"


def only(row: KeyRow) -> str:
    """The answer to a key that can have some values only."""
    values = [value for value in row.only if value not in (None, "")]
    if not values or row.takes == "nothing":
        return f"refused: {row.reason}"
    if any(value is False or value == 0 for value in values):
        return f"refused unless {values[0]}: {row.reason}"
    note = f": {row.note}" if row.note else ""
    reason = f": {row.reason}" if row.reason else ""
    return f"{', '.join(map(code, values))}{note}; others are refused{reason}"


def marked(text: str) -> str:
    """The text with its keys and flags as code."""
    parts = text.split("`")
    parts[::2] = [KEY.sub(r"`\g<0>`", part) for part in parts[::2]]
    return "`".join(parts)


def code(value: Any) -> str:
    return f"`{value if isinstance(value, str) else shown(value)}`"


if __name__ == "__main__":
    write_or_check(PAGE, page, __doc__)
