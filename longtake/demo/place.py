"""The folder of a demo: which one a call works in, and the note in it that lets an interrupted demo go on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from longtake.contracts import UserError
from longtake.durable import write_whole

NOTE = "demo.json"
REPORT = "report.html"


@dataclass
class Note:
    """What a demo was asked for, and how long its parts have taken so far."""

    overrides: list[str]
    num_clips: int
    num_stills: int
    seconds: dict[str, float] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Writes the note into the demo's folder, whole or not at all."""
        write_whole(folder / NOTE, json.dumps(asdict(self), indent=1) + "\n")


def choose_folder(folder: Path) -> Path:
    """`folder`, where a demo can begin or go on; else the first of `folder-2`, `folder-3`, ... where it can.

    A demo begins in a folder that is not there or empty and goes on in one that holds a note and no report. A finished
    demo, and anything else of the user's, is left alone.
    """
    number = 1
    while True:
        path = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        if path.exists() and not path.is_dir():
            raise UserError(f"{path}: is a file; give the demo a folder, such as --folder outputs/demo")
        if not path.exists() or not any(path.iterdir()) or ((path / NOTE).exists() and not (path / REPORT).exists()):
            return path
        number += 1


def read_note(folder: Path, overrides: Sequence[str], num_clips: int, num_stills: int) -> Note:
    """The note of the demo that goes on in `folder`, with `overrides` added to its own; a new one where none begins.

    The number of clips is that of the first call. Raises `UserError` where the note cannot be read.
    """
    try:
        found = json.loads((folder / NOTE).read_text(encoding="utf-8"))
        note = Note(
            overrides=[str(word) for word in found["overrides"]],
            num_clips=int(found["num_clips"]),
            num_stills=int(found["num_stills"]),
            seconds={str(name): float(value) for name, value in found["seconds"].items()},
        )
    except FileNotFoundError:
        return Note(list(overrides), num_clips, num_stills)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder / NOTE}: is damaged ({error}); remove {folder} or give another --folder") from error
    note.overrides += overrides
    return note


def find_run(folder: Path) -> Path | None:
    """The training run of the demo in `folder`, if it has one that can be continued: the newest with a config."""
    found = [path.parent for path in folder.glob("run*/config.py")]
    return max(found, key=lambda path: (path / "config.py").stat().st_mtime) if found else None


def free_folder(folder: Path) -> Path:
    """`folder`, or with the first number that is not taken."""
    path, number = folder, 2
    while path.exists():
        path, number = folder.with_name(f"{folder.name}-{number}"), number + 1
    return path
