"""Where prompts come from: the command line, a text file or a table."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from longtake.contracts import UserError


@dataclass(frozen=True)
class Prompt:
    """One prompt and the name its files are given."""

    text: str
    name: str
    negative: str | None = None  # None: the run's negative prompt


def read_prompts(prompt: str | list[str] | None, file: str | None, limit: int | None = None) -> list[Prompt]:
    """The prompts of a generation, at most `limit`. Raises `UserError` where there is none."""
    if prompt is not None and file is not None:
        raise UserError(f"prompts = {file!r}: prompt is given too; keep one of the two")
    if file is not None:
        prompts = _from_file(Path(file))
    else:
        texts = [prompt] if isinstance(prompt, str) else list(prompt or [])
        prompts = [Prompt(text, f"prompt_{i:04d}") for i, text in enumerate(texts)]
    if not prompts:
        where = f"prompts = {file!r}: no prompt in it" if file else "prompt = None: nothing to generate"
        raise UserError(f'{where}; write --prompt "a red circle moves left" or --prompts FILE')
    return prompts[:limit]


def _from_file(path: Path) -> list[Prompt]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"prompts = {str(path)!r}: cannot be read as text ({error}); give a .txt or .csv file") from error
    if path.suffix.lower() != ".csv":
        lines = [line.strip() for line in text.splitlines()]
        return [Prompt(line, f"{path.stem}_{i:04d}") for i, line in enumerate(line for line in lines if line)]
    rows = csv.DictReader(text.splitlines(keepends=True))
    if "text" not in (rows.fieldnames or []):
        raise UserError(f"prompts = {str(path)!r}: columns are {rows.fieldnames}; a column named text is needed")
    prompts = []
    for i, row in enumerate(rows):
        name = (row.get("name") or "").strip() or f"{path.stem}_{i:04d}"
        if "/" in name or name.startswith("."):
            raise UserError(f"prompts = {str(path)!r}: name {name!r} in row {i + 1}: a plain file name is needed")
        prompts.append(Prompt(row["text"], name, row.get("neg") or None))
    return prompts
