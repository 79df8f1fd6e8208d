"""Where prompts come from: the command line, a text file or a table."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from longtake.contracts import UserError

_MAX_NAME_BYTES = 200  # file systems take 255; a number, a suffix and a temporary name are added


@dataclass(frozen=True)
class Prompt:
    """One prompt and the name its files are given."""

    text: str
    name: str
    negative: str | None = None  # None: the run's negative prompt


def read_prompts(prompt: str | Sequence[str] | None, file: str | None, limit: int | None = None) -> list[Prompt]:
    """The prompts of a generation, at most `limit`.

    `prompt`: one or several, named `prompt_0000`, ...; or `file`: a `.csv` table with a column `text` and, where
    wanted, `name` (of the files) and `neg` (negative prompt), or any other text file, one prompt a line, blank lines
    left out, named `{file}_0000`, ... Raises `UserError` where both or neither are given, or the file is not so.
    """
    if prompt is not None and file is not None:
        raise UserError(f"prompts = {file!r}: prompt is given too; keep one of the two")
    if file is not None:
        prompts = _from_file(Path(file))
    else:
        texts = [prompt] if isinstance(prompt, str) else list(prompt or [])
        prompts = [Prompt(text, f"prompt_{i:04d}") for i, text in enumerate(texts)]
    if not prompts:
        where = f"prompts = {file!r}: no prompt is in it" if file else "prompt = None: there is nothing to generate"
        raise UserError(f'{where}; write --prompt "a red circle moves left" or --prompts FILE')
    if file is None and not all(p.text.strip() for p in prompts):
        raise UserError("prompt = '': a prompt is empty; write what the video shows")
    return prompts[:limit]


def _from_file(path: Path) -> list[Prompt]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UserError(f"prompts = {str(path)!r}: cannot be read ({reason}); give a .txt or .csv file") from error
    if path.suffix.lower() == ".csv":
        return _from_table(path, text)
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    return [Prompt(line, f"{path.stem}_{i:04d}") for i, line in enumerate(lines)]


def _from_table(path: Path, text: str) -> list[Prompt]:
    rows = csv.DictReader(io.StringIO(text, newline=""))
    try:
        columns, table = rows.fieldnames or [], list(rows)
    except csv.Error as error:
        raise UserError(f"prompts = {str(path)!r}: line {rows.line_num} is no CSV ({error}); mend it") from error
    if not columns:
        return []
    if "text" not in columns:
        raise UserError(
            f"prompts = {str(path)!r}: its columns are {', '.join(columns)}; the prompts must be in a column named text"
        )
    prompts = []
    for number, row in enumerate(table):
        prompt, name = (row["text"] or "").strip(), (row.get("name") or "").strip() or f"{path.stem}_{number:04d}"
        if not prompt:
            raise UserError(
                f"prompts = {str(path)!r}: text is empty in row {number + 1}; fill it in or take the row out"
            )
        if any(mark in name for mark in "/\\\0") or name.startswith(".") or len(name.encode()) > _MAX_NAME_BYTES:
            raise UserError(
                f"prompts = {str(path)!r}: name {name!r} in row {number + 1} is no plain file name; change it"
            )
        prompts.append(Prompt(prompt, name, (row.get("neg") or "").strip() or None))
    return prompts
