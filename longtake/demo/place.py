"""The folder of a demo: which one a call works in, and the note in it that lets an interrupted demo go on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from longtake.contracts import UserError
from longtake.durable import write_whole

NOTE = "demo.json"
REPORT = "report.html"
SUMMARY = "summary.json"  # what a page of several demos shows of one
USUAL = "shapes"  # the system of a demo that names none


@dataclass
class Note:
    """What a demo was asked for, and how long its parts have taken so far."""

    overrides: list[str]
    num_clips: int
    num_stills: int
    seconds: dict[str, float] = field(default_factory=dict)
    system: str = USUAL

    def save(self, folder: Path) -> None:
        write_whole(folder / NOTE, json.dumps(asdict(self), indent=1) + "\n")


def usual_name(system: str) -> str:
    """Return the name of a system's folder."""
    return "demo" if system == USUAL else f"demo_{system}"


def choose_folder(folder: Path) -> Path:
    """`folder`, where a demo can begin or go on; else the first of `folder-2`, `folder-3`, ... where it can.

    A demo begins in a folder that is not there or empty and goes on in one that holds a note and no report. A finished
    demo, and anything else of the user's, is left alone. Raises `UserError` where a file is in the way.
    """
    for path in numbered(folder):
        if path.exists() and not path.is_dir():
            raise UserError(f"{path}: is a file; give the demo a folder, such as --folder outputs/demo")
        if not path.exists() or not any(path.iterdir()) or ((path / NOTE).exists() and not (path / REPORT).exists()):
            break
    return path


def free_folder(folder: Path) -> Path:
    return next(path for path in numbered(folder) if not path.exists())


def numbered(folder: Path) -> Iterator[Path]:
    yield folder
    yield from (folder.with_name(f"{folder.name}-{number}") for number in count(2))


def read_note(folder: Path, overrides: Sequence[str], num_clips: int, num_stills: int, system: str = USUAL) -> Note:
    """Return the note of the demo that goes on in `folder`, with its own number of clips and `overrides` added; a
    new one where none begins. Raises `UserError` where the note cannot be read, or is of another system."""
    try:
        note = TypeAdapter(Note).validate_json((folder / NOTE).read_bytes())
    except FileNotFoundError:
        return Note(list(overrides), num_clips, num_stills, system=system)
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise UserError(f"{folder / NOTE}: is damaged ({reason}); remove {folder} or give another --folder") from error
    if note.system != system:
        raise UserError(f"--system {system}: an unfinished demo of {note.system} is in {folder}; give another --folder")
    note.overrides += overrides
    return note


def find_run(folder: Path, name: str = "run") -> Path | None:
    """Return the newest run of a name in a demo's folder that can be continued, if there is one."""
    found = [path.parent for path in folder.glob(f"{name}*/config.py")]
    return max(found, key=lambda path: (path / "config.py").stat().st_mtime) if found else None
