"""Captions of a table changed in place: from `.txt` files beside the clips, by rules, or in an editor."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import pyarrow as pa

from longtake.contracts import UserError
from longtake.data.clips.caption_files import CaptionFiles, read_caption
from longtake.data.clips.locations import is_url, join_location
from longtake.data.tables.rows import open_rows
from longtake.data.tables.table import base_folder
from longtake.data.tables.write_rows import write_table

_MOST_NAMED = 10  # rows that cannot be read
Change = Callable[[str, str], str]  # (location of a clip, its caption) -> its caption


def edit_captions(
    source: Path, changes: Sequence[Change], column: str = "text", in_editor: bool = False
) -> tuple[int, int]:
    """Change the captions of a table, which is written whole or not at all; return (rows that are new, rows).

    changes: applied to each row in their order. in_editor: the outcome is opened in `$VISUAL` or `$EDITOR`, a line for
    each clip. Clip ids, numbers and the order of rows stay. Raises `UserError` for shards, a table without paths, and
    rows that cannot be read.
    """
    if source.is_dir():
        advice = (
            "of shards give the table that they were made from, and make them anew afterwards; of a folder of clips "
        )
        advice += f"change the .txt files, or make a table: `longtake data probe {source} -o clips.csv`"
        raise UserError(f"{source}: is a folder; {advice}")
    columns, unreadable = open_rows(source, as_text=source.suffix.lower() == ".csv").whole()
    if unreadable:
        shown = "; ".join(f"row {row}: {why}" for row, why in islice(unreadable.items(), _MOST_NAMED))
        more = f"; and {len(unreadable) - _MOST_NAMED} more" if len(unreadable) > _MOST_NAMED else ""
        raise UserError(f"{source}: {len(unreadable)} rows cannot be read ({shown}{more}); fix them first")
    if "path" not in columns.column_names:
        raise UserError(f"{source}: has no column path; its columns are {', '.join(columns.column_names)}")
    place, paths = base_folder(source, None), [str(path) for path in columns.column("path").to_pylist()]
    there = column in columns.column_names
    before = [text or "" for text in columns.column(column).to_pylist()] if there else [""] * len(paths)
    after = list(before)
    for change in changes:
        after = [change(join_location(place, path), text) for path, text in zip(paths, after, strict=True)]
    if in_editor:
        after = _edited(paths, after)
    texts = pa.chunked_array([pa.array(after, pa.string())])
    where = columns.column_names.index(column) if there else columns.num_columns
    changed = columns.set_column(where, column, texts) if there else columns.append_column(column, texts)
    if count := sum(old != new for old, new in zip(before, after, strict=True)):
        write_table(changed, source)
    return count, len(paths)


@dataclass
class FromFiles:
    """A change to what the caption files next to clips hold; other captions stay, as do those of `unread` files."""

    count: int = 0  # clips that have such a file
    unread: dict[str, str] = field(default_factory=dict)  # location of a clip -> why its file cannot be read
    files: CaptionFiles = field(default_factory=CaptionFiles)

    def __call__(self, location: str, text: str) -> str:
        file = None if is_url(location) else self.files.find(Path(location))
        if file is None:
            return text
        self.count += 1
        try:
            return read_caption(file)
        except ValueError as error:
            self.unread[location] = str(error)
            return text


def _edited(paths: list[str], texts: list[str]) -> list[str]:
    """Return the captions as somebody leaves them in an editor, a line `path<TAB>caption` each."""
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    lines = [f"{path}\t{' '.join(text.split())}" for path, text in zip(paths, texts, strict=True)]
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8", delete=False) as file:
        file.write("".join(line + "\n" for line in lines))
    if status := subprocess.run([*shlex.split(editor), file.name]).returncode:
        raise UserError(f"{editor} ended with status {status}; nothing was changed, what it left is in {file.name}")
    left = [line.split("\t", 1) for line in Path(file.name).read_text("utf-8").splitlines()]
    if [line[0] for line in left] != paths or any(len(line) < 2 for line in left):
        raise UserError(f"{file.name}: its lines are no longer the table's clips; nothing was changed, try again")
    Path(file.name).unlink()
    return [
        old if line[1] == shown.split("\t", 1)[1] else line[1]
        for line, shown, old in zip(left, lines, texts, strict=True)
    ]
