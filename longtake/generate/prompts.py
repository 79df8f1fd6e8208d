"""Sources of prompts: the command line, a text file or a table, of which all errors are listed at once."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any

from longtake.contracts import UserError
from longtake.data.tables.csv_records import read_header, records
from longtake.generate.prompt_lines import has_options, is_comment, read_line
from longtake.small_files import decode_text, parse_json, readable_text

MAX_NAME_BYTES = 200  # file systems take 255; a number, a suffix and a temporary name are added
TABLE_FIX = "mend these rows, or take them out"
_COLUMNS = ("text", "name", "neg", "ref", "mask", "cond_type", "carries", "strength", "edit_ratio")
# Columns with options of a row's own, and what their cells are.
OPTIONS = {"seed": int, "resolution": str, "aspect_ratio": str, "num_frames": int, "num_steps": int}
OPTIONS |= {"guidance": float, "lora_strength": float}
_MAX_FAULTS = 20  # listed in one error
STORYBOARDS = (".json", ".jsonl")
_OF_SCENES = {"text": str, "requires_scene_transition": bool, "neg_text": (str, type(None))}


@dataclass(frozen=True)
class Prompt:
    """One prompt and the name of its files; what is None is as the run has it."""

    text: str
    name: str
    negative: str | None = None
    refs: tuple[str, ...] = ()  # reference files, in the order they were written
    row: int = field(default=0, compare=False)  # its position among all given prompts, from 0
    mask: str | None = None  # file; white is to be made
    strength: float | None = None  # share of noise that it begins from
    edit_ratio: float | None = None
    kind: str | None = None  # of its known frames
    carries: str | None = None  # kind of known frames that a later clip of a video takes from those before it
    brings: tuple[tuple[str, str], ...] = ()  # companions by name: files, `;` between several
    repeat: int = 0  # which of the further clips that its row stands for, from 1
    options: tuple[tuple[str, Any], ...] = ()  # of `OPTIONS`, where its row says them
    then: tuple[Prompt, ...] = ()  # the later clips of its video

    @property
    def clips(self) -> tuple[Prompt, ...]:
        """The prompt of every clip of its video."""
        return self, *self.then


def read_prompts(
    prompt: str | Sequence[str] | None,
    file: str | None,
    limit: int | None = None,
    *,
    ref: str | Sequence[str] | None = None,
    start: int = 0,
    end: int | None = None,
    faults: list[str] | None = None,
    companions: Sequence[str] = (),
    scene_marks: tuple[str, str] | None = None,
) -> list[Prompt]:
    """Return the prompts of a generation: `[start:end]` of all that are given, at most `limit`.

    `prompt`: one or several, named `prompt_0000`, ...; or `file`: a `.csv` table with a column `text` and optional
    columns `name` (of the files), `neg` (negative prompt) and `ref` (images or videos separated by `;`, relative to the
    table's folder or else to the working directory), or a text file with one prompt a line and options as in
    musubi-tuner, see `prompt_lines`, named `{file}_0000`, ...
    `ref` is the default for prompts without their own. Columns named as `companions` hold files too; those of `OPTIONS`
    are options of a row's own. A row with `carries`, a kind of known frames, is one more clip of the video above; or a
    `.json` or `.jsonl` of storyboards, see `_from_storyboards`, of a model whose segments have texts of their own.
    Raises `UserError` where both or neither are given, or the file is malformed; all faulty rows of a table are
    reported at once, or appended to `faults` where it is a list. scene_marks: what ends a scene, and what begins the
    next; None: the model has one text for a video.
    """
    if prompt is not None and file is not None:
        raise UserError(f"prompts = {file!r}: prompt is given too; keep one of the two")
    if file is not None:
        prompts = _from_file(Path(file), faults, companions, scene_marks)
    else:
        texts = [prompt] if isinstance(prompt, str) else list(prompt or [])
        if (text := next(filter(has_options, texts), None)) is not None:
            fix = "write them as flags here, such as --num-frames, --seed or --negative-prompt"
            raise UserError(f"prompt = {text!r}: options behind a prompt are read in a file of prompts alone; {fix}")
        prompts = [Prompt(text, f"prompt_{i:04d}") for i, text in enumerate(texts)]
    if not prompts:
        where = f"prompts = {file!r}: no prompt is in it" if file else "prompt = None: there is nothing to generate"
        raise UserError(f'{where}; write --prompt "a red circle moves left" or --prompts FILE')
    if file is None and not all(p.text.strip() for p in prompts):
        raise UserError("prompt = '': a prompt is empty; write what the video shows")
    default = split_paths(ref)
    joined: list[Prompt] = []
    for row, p in enumerate(prompts):
        if p.carries is None or not joined:
            joined.append(replace(p, refs=p.refs or default, row=row))
        else:
            joined[-1] = replace(joined[-1], then=(*joined[-1].then, replace(p, row=row)))
    chosen = joined[start:end][:limit]
    if not chosen:
        until = "" if end is None else f", end_index = {end}"
        raise UserError(f"start_index = {start}{until}: leaves none of {len(prompts)} prompts; choose other numbers")
    return chosen


def split_paths(text: str | Sequence[str] | None) -> tuple[str, ...]:
    texts = [text] if isinstance(text, str) else text or ()
    return tuple(part.strip() for one in texts for part in one.split(";") if part.strip())


def in_one_sentence(place: str, faults: Sequence[str], fix: str) -> UserError:
    """Return the error for several faults at once; `place` is empty where each fault names its own."""
    more = f"; and {len(faults) - _MAX_FAULTS} more" if len(faults) > _MAX_FAULTS else ""
    return UserError(f"{place}{': ' if place else ''}{'; '.join(faults[:_MAX_FAULTS])}{more}; {fix}")


def _from_file(
    path: Path, faults: list[str] | None, companions: Sequence[str], scene_marks: tuple[str, str] | None
) -> list[Prompt]:
    try:
        data = path.read_bytes()
        text = readable_text(decode_text(data))
    except (OSError, ValueError) as error:
        raise UserError(
            f"prompts = {str(path)!r}: cannot be read ({_why_unread(error)}); give a .txt, .csv or .json file"
        ) from error
    found: list[str] = []
    suffix = path.suffix.lower()
    if suffix == ".csv":
        prompts = _from_table(path, text, found, companions)
    elif suffix in STORYBOARDS:
        prompts = _from_storyboards(path, text, found, scene_marks)
    else:
        prompts = _from_lines(path, text, found)
    if found and faults is None:
        raise in_one_sentence(f"prompts = {str(path)!r}", found, TABLE_FIX)
    if faults is not None:
        faults += found
    return prompts


def _from_lines(path: Path, text: str, faults: list[str]) -> list[Prompt]:
    """Return the prompts of a text file, one a line, with the options behind them; faults of lines are appended."""
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if not is_comment(line)]
    prompts = []
    for row, (number, line) in enumerate(lines):
        said = read_line(line, number, faults)
        refs = tuple(file for ref in said.refs for file in _beside(path, ref))
        name = f"{path.stem}_{row:04d}"
        prompts.append(Prompt(said.text, name, said.negative, refs, options=tuple(said.options)))
    return prompts


def _why_unread(error: OSError | ValueError) -> str:
    if isinstance(error, OSError):
        return str(error.strerror)
    if isinstance(error, UnicodeDecodeError):
        return f"line {error.object[: error.start].count(10) + 1} is not UTF-8"
    return str(error)


def _from_storyboards(path: Path, text: str, faults: list[str], scene_marks: tuple[str, str] | None) -> list[Prompt]:
    """Return the prompts of a list of videos, each a list of scenes, one for each segment; `.jsonl`: a video a line.

    A scene is {"text": ..., "requires_scene_transition": false, "neg_text": null}. Where one that is not the first asks
    for a transition, a mark goes behind the text before it, and one before its own. Faults of scenes are appended to
    `faults`.
    """
    place = f"prompts = {str(path)!r}"
    if scene_marks is None:
        raise UserError(f"{place}: this model has one text for a video, not one for each segment; give a .txt or .csv")
    by_line = path.suffix.lower() == ".jsonl"
    videos, lines = [], text.split("\n") if by_line else [text]
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                read = parse_json(line)
            except ValueError as error:
                where = f"line {number}" if by_line else "it"
                raise UserError(f"{place}: {where} is not JSON ({error}); mend it") from error
            if not by_line and not isinstance(read, list):
                raise UserError(f'{place}: is no list of videos; write [[{{"text": ...}}, ...], ...]')
            if not by_line and read and all(isinstance(scene, dict) for scene in read):
                raise UserError(
                    f"{place}: is one list of scenes; write a list of such lists, [[...]], one for each video"
                )
            videos += [read] if by_line else read
    prompts = []
    for number, scenes in enumerate(videos):
        if found := list(_scene_faults(scenes)):
            faults += [f"{fault} in row {number + 1}" for fault in found]
            continue
        texts = [scene["text"] for scene in scenes]
        for i, scene in enumerate(scenes):
            if i and scene.get("requires_scene_transition"):
                texts[i - 1], texts[i] = texts[i - 1] + scene_marks[0], scene_marks[1] + texts[i]
        negatives = [scene.get("neg_text") or "" for scene in scenes]
        negative = json.dumps(negatives, ensure_ascii=False) if any(negatives) else None
        prompts.append(Prompt(json.dumps(texts, ensure_ascii=False), f"{path.stem}_{number:04d}", negative))
    return prompts


def _scene_faults(scenes: Any) -> Iterator[str]:
    """Yield the errors in one video's list of scenes in a storyboard file."""
    if not isinstance(scenes, list) or not scenes:
        yield "there is no list of scenes"
        return
    for number, scene in enumerate(scenes, 1):
        if not isinstance(scene, dict) or not isinstance(scene.get("text"), str) or not scene["text"].strip():
            yield f"scene {number} has no text"
            continue
        if "\0" in scene["text"]:
            yield f"the text of scene {number} has a NUL character"
        for key, value in scene.items():
            if key not in _OF_SCENES:
                yield f"scene {number} has {key!r}, which is none of {', '.join(_OF_SCENES)}"
            elif not isinstance(value, _OF_SCENES[key]):
                yield f"{key} of scene {number} is {value!r}"


def _from_table(path: Path, text: str, faults: list[str], companions: Sequence[str]) -> list[Prompt]:
    """Return the prompts of a table's rows; faults of rows are appended to `faults`."""
    data = text.replace("\r\n", "\n").encode()
    header = read_header(data, f"prompts = {str(path)!r}")
    columns = header.names
    if not columns:
        return []
    if "text" not in columns:
        raise UserError(
            f"prompts = {str(path)!r}: its columns are {', '.join(columns)}; the prompts must be in a column named text"
        )
    if twice := [column for column in _COLUMNS if columns.count(column) > 1]:
        raise UserError(f"prompts = {str(path)!r}: has {columns.count(twice[0])} columns {twice[0]}; keep one of them")
    prompts = []
    for number, (line, cells) in enumerate(records(data, header, may_be_short=True)):
        if isinstance(cells, str):
            faults.append(f"line {line}: {cells}")
            continue
        row = dict(zip(columns, map(bytes.decode, cells), strict=True))
        cell = {column: (row.get(column) or "").strip() for column in (*_COLUMNS, *OPTIONS)}
        name = cell["name"] or f"{path.stem}_{number:04d}"
        if not cell["text"]:
            faults.append(f"text is empty in row {number + 1}")
        if any(mark in name for mark in "/\\\0") or name.startswith(".") or len(name.encode()) > MAX_NAME_BYTES:
            faults.append(f"name {name!r} in row {number + 1} is not a plain file name")
        if cell["carries"] and not prompts:
            faults.append("carries stands in row 1, which has no video above it")
        if cell["carries"] and (
            alone := next((key for key in ("ref", "mask", "name", "cond_type", *OPTIONS) if cell[key]), None)
        ):
            faults.append(f"{alone} is given in row {number + 1}, which carries on the video above")
        shares = {key: _share(cell[key], f"{key} in row {number + 1}", faults) for key in ("strength", "edit_ratio")}
        refs, masks = (_beside(path, cell[key]) for key in ("ref", "mask"))
        brings = tuple((name, ";".join(files)) for name in companions if (files := _beside(path, row.get(name) or "")))
        rest = {"mask": next(iter(masks), None), "brings": brings, **shares}
        rest |= {"kind": cell["cond_type"] or None, "carries": cell["carries"] or None}
        options = {key: _option(key, cell[key], number + 1, faults) for key in OPTIONS if cell[key]}
        said = tuple((key, value) for key, value in options.items() if value is not None)
        prompts.append(Prompt(cell["text"], name, cell["neg"] or None, refs, options=said, **rest))
    return prompts


def _beside(table: Path, cell: str) -> tuple[str, ...]:
    """Return the files that a cell of a table names, relative to its folder where they are there."""
    places = [Path(part).expanduser() for part in split_paths(cell)]
    return tuple(str(beside if (beside := table.parent / place).exists() else place) for place in places)


def _option(key: str, text: str, row: int, faults: list[str]) -> int | float | str | None:
    """Return the value in a cell of a column in `OPTIONS`; None with a fault where a number is missing or not
    finite."""
    try:
        value = OPTIONS[key](text)
    except ValueError:
        value = None
    if value is None or (isinstance(value, float) and not isfinite(value)):
        faults.append(f"{key} in row {row} is {text!r}, not {'a whole' if OPTIONS[key] is int else 'a'} number")
        return None
    return value


def _share(text: str, place: str, faults: list[str]) -> float | None:
    """Return a number from 0 to 1; None where nothing is written."""
    try:
        if not text or 0 <= (share := float(text)) <= 1:
            return share if text else None
    except ValueError:
        pass
    faults.append(f"{place} is {text!r}, not a number from 0 to 1")
    return None
