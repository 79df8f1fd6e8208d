"""Caption files next to clips: which file is a clip's, and the text that it holds."""

from __future__ import annotations

import os
import unicodedata
from pathlib import Path

from longtake.small_files import decode_text, read_small, readable_text

CAPTION_SUFFIX = ".txt"


class CaptionFiles:
    """Finds the caption files of clips; each folder is listed once."""

    def __init__(self) -> None:
        self._names: dict[Path, dict[str, str]] = {}  # of each folder: exact names, and names by their key

    def find(self, clip: Path) -> Path | None:
        """`a.mp4.txt` or `a.txt` next to `a.mp4`, whatever the case and Unicode form of their names."""
        names = self._listed(clip.parent)
        wanted = [clip.name + CAPTION_SUFFIX, clip.stem + CAPTION_SUFFIX]
        for name in (*wanted, *map(name_key, wanted)):
            if name in names:
                return clip.with_name(names[name])
        return None

    def _listed(self, folder: Path) -> dict[str, str]:
        if folder not in self._names:
            try:
                names = sorted(os.listdir(folder))
            except OSError:  # the probe of the clip gives the reason
                names = []
            texts = [name for name in names if name.lower().endswith(CAPTION_SUFFIX)]
            self._names[folder] = {name_key(name): name for name in texts} | {name: name for name in texts}
        return self._names[folder]


def name_key(name: str) -> str:
    """Equal for names that differ in case or in how accents are encoded, as between macOS and Linux."""
    return unicodedata.normalize("NFC", name).casefold()


def read_caption(file: Path) -> str:
    """Return the text of a caption file, in UTF-8 or in UTF-16 with its mark, without white space at its ends.

    Raises `ValueError` with the reason where it cannot be read.
    """
    try:
        return readable_text(decode_text(read_small(file))).strip()
    except UnicodeDecodeError as error:
        raise ValueError(f"its caption {file.name} is not UTF-8 ({error.reason}); save it as UTF-8") from error
    except OSError as error:
        raise ValueError(f"its caption {file.name} cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        raise ValueError(f"its caption {file.name} cannot be read ({error})") from error
