"""The folders that the page may see: every path that comes from a browser passes through here."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from longtake.checkpoint.runs import list_checkpoints
from longtake.contracts import UserError, visible
from longtake.data.clips.formats import CLIP_SUFFIXES
from longtake.data.clips.video import is_image
from longtake.presets import find_preset
from longtake.train.run_file import CONFIG_FILE

_DEEPEST = 4  # folders below a root that are searched
_MOST = 500  # files that are offered
_NOUNS = {  # by the kind of path that is asked for
    "table": "a table or a folder",
    "clips": "a folder or table",
    "image": "an image",
    "LoRA": "a LoRA file",
    "weights": "a file of weights",
}
_MAX_NAME_BYTES = 255  # of the usual file systems
_MAX_PATH_LENGTH = 2000  # half of what Linux takes: a root comes in front


class MalformedPath(UserError):
    """Text that no path can be, whatever there is."""


@dataclass(frozen=True)
class Roots:
    """Resolved folders; the first is where the page keeps what it makes, in `ui`."""

    folders: tuple[Path, ...]
    typed: tuple[str, ...] = ()  # the folders as the command line had them

    @classmethod
    def of(cls, folders: Sequence[Path]) -> Roots:
        """Raise `UserError` where one is no folder."""
        for folder in folders:
            if not folder.is_dir():
                raise UserError(f"{folder}: is no folder; give folders that the page may see, such as outputs")
        return cls(tuple(folder.resolve() for folder in folders), tuple(map(str, folders)))

    @property
    def own(self) -> Path:
        return self.folders[0] / "ui"

    @property
    def uploads(self) -> Path:
        return self.own / "uploads"

    def path(self, text: str, kind: str = "path") -> Path:
        """Return a path inside a root, links followed.

        A root may have its name on the command line, or its last one. Other relative paths start from the first root
        that has them, else from such a name, else from the first root. Raises `UserError` for a path that lies
        elsewhere or is not there.
        """
        text = _checked(text, kind)
        if not text:
            raise MalformedPath(f"Choose {_NOUNS.get(kind, f'a {kind}')} first")
        try:
            inside = [Path(os.path.realpath(root / text)) for root in self.folders]
            named = [Path(os.path.realpath(root / rest)) for root, rest in self._after_names(text)]
            places = [*(place for place in named if place in self.folders), *inside, *named]
            found = next((place for place in places if self.holds(place) and place.exists()), None)
        except OSError as error:  # a folder on the way may not be read, say
            raise UserError(f"{kind} {visible(text)}: {error.strerror}") from None
        if found is None and not all(map(self.holds, places)):
            raise UserError(f"{kind} {visible(text)}: lies outside of what this page may see; give one inside {self}")
        if found is None:
            noun = _NOUNS.get(kind, f"a {kind}").partition(" ")[2]
            whole = "" if "file" in noun else "; for one of these folders itself give its absolute path"
            raise UserError(f'No {noun} "{visible(text)}" in {self}{whole}')
        if found.is_relative_to(self.uploads) and not is_image(found):
            raise UserError(f"{kind} {visible(text)}: is an upload, and no picture; give another")
        return found

    def _after_names(self, text: str) -> Iterator[tuple[Path, Path]]:
        """(root, rest) where `text` begins with a root's name: as it was typed, or its last one."""
        for root, typed in zip(self.folders, self.typed, strict=False):
            for name in (typed, root.name):
                if name and Path(text).is_relative_to(name):
                    yield root, Path(text).relative_to(name)

    def clip_folders(self) -> list[Path]:
        """Return the roots that are folders of clips; the first, where the page writes, only with clips
        directly in it."""
        runs = self.runs()
        return [
            root
            for root in self.folders
            if any(name.lower().endswith(CLIP_SUFFIXES) for name in os.listdir(root))
            or (root != self.folders[0] and any(_outside(path, runs) for path in self._files(CLIP_SUFFIXES, (root,))))
        ]

    def model(self, text: str) -> str:
        """Return the start of a generation: a path inside a root, or a preset's name."""
        return text.strip() if self._is_preset(text) else str(self.path(text, "model"))

    def _is_preset(self, text: str) -> bool:
        words = _checked(text, "model")
        return bool(words) and not Path(words).is_absolute() and find_preset(words, "inference") is not None

    def holds(self, path: Path) -> bool:
        """Return whether a resolved path is inside a root."""
        return any(path.is_relative_to(root) for root in self.folders)

    def runs(self) -> list[Path]:
        """Return the folders of runs, the one that changed last first."""
        found = [path.parent for path in self._files((CONFIG_FILE,))]
        return sorted(found, key=lambda run: run.stat().st_mtime, reverse=True)

    def models(self) -> list[str]:
        """Return the runs that have a checkpoint, and exported files of weights."""
        runs = [str(run) for run in self.runs() if any(info.complete for info in list_checkpoints(run))]
        files = [path for path in self.files((".safetensors",)) if "model" in path.stem]
        return runs + [str(path) for path in files if not path.stem.startswith("adapter")]  # as peft names adapters

    def named(self, paths: Iterable[str | Path]) -> list[tuple[str, str]]:
        """Return (label, path) pairs: the label is a path inside a root without the root, or a root as it was typed."""
        found = []
        for path in map(Path, paths):
            root = next((root for root in self.folders if path.is_relative_to(root)), None)
            shown = path if root in (None, path) else path.relative_to(root)
            typed = next((name for folder, name in zip(self.folders, self.typed, strict=False) if folder == path), None)
            found.append((typed or str(shown), str(path)))
        return found

    def files(self, suffixes: tuple[str, ...]) -> list[Path]:
        """Files by their ends, the newest first."""
        return sorted(self._files(suffixes), key=lambda path: path.stat().st_mtime, reverse=True)

    def _files(self, ends: tuple[str, ...], roots: tuple[Path, ...] = ()) -> Iterator[Path]:
        left = _MOST
        for root in roots or self.folders:
            for place, folders, names in os.walk(root):
                deep = len(Path(place).relative_to(root).parts) >= _DEEPEST
                is_run = CONFIG_FILE in names
                # what lies in a checkpoint is no file of anybody's, and a run has many
                hidden = [name for name in folders if name.startswith((".", "epoch")) or (is_run and name == "watch")]
                folders[:] = [] if deep else sorted(set(folders) - set(hidden) - {"queue", "uploads"})
                for name in names:
                    if name.lower().endswith(ends) and self.holds(path := Path(place, name).resolve()) and left > 0:
                        left -= 1
                        yield path

    def __str__(self) -> str:
        return " or ".join(map(str, self.folders))


def _outside(path: Path, folders: Sequence[Path]) -> bool:
    return not any(path.is_relative_to(folder) for folder in folders)


def _checked(text: object, kind: str) -> str:
    """`text` without blanks at its ends. Raises `MalformedPath` for values that the system takes for no path."""
    if not isinstance(text, str | None):
        raise MalformedPath(f"{kind}: expected a path, got a value of type {type(text).__name__}")
    text = (text or "").strip()
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise MalformedPath(f"{kind}: a path has no NUL and no half of a character; delete it")
    if max(len(os.fsencode(name)) for name in text.split("/")) > _MAX_NAME_BYTES or len(text) > _MAX_PATH_LENGTH:
        raise MalformedPath(f"{kind} {visible(text[:40])}…: is longer than names of files can be; give another")
    return text
