"""Small files that Longtake or its user has written, read so that no content hangs the program or fills its memory."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from longtake.contracts import UserError
from longtake.durable import write_whole

MOST_BYTES = 1 << 26
_PACKAGE = Path(__file__).parent
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")  # but tab and line breaks
_MARKS = {  # UTF-32's mark begins with that of UTF-16
    "UTF-32": (b"\xff\xfe\0\0", b"\0\0\xfe\xff"),
    "UTF-16": (b"\xff\xfe", b"\xfe\xff"),
}


def read_small(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Return the content of a regular file. Raises OSError, and ValueError for one that is no file or too large."""
    no_wait = getattr(os, "O_NONBLOCK", 0)  # a pipe is refused, not waited for; Windows has none in its folders
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | no_wait)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is no regular file")
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise ValueError(f"it is too large: more than {most_bytes:,} bytes")
    return data


def encoding_by_mark(head: bytes) -> str | None:
    """Return the encoding that a byte order mark names, other than UTF-8; `head`: the first four bytes."""
    for encoding, marks in _MARKS.items():
        if head.startswith(marks):
            return encoding
    return None


def decode_text(data: bytes) -> str:
    """Text in UTF-8, or in UTF-16 or UTF-32 with its byte order mark, which is left out. Raises `ValueError`."""
    if encoding := encoding_by_mark(data[:4]):
        return data.decode(encoding)
    text = data.decode("utf-8-sig")
    if "\0" in text:
        raise ValueError("it has NUL bytes, as UTF-16 without its mark")
    return text


def readable_text(text: str) -> str:
    """Return a text for a model, control characters other than tab and line breaks as blanks. Raises `ValueError` for
    NUL."""
    if "\0" in text:
        raise ValueError("has a NUL character, as UTF-16 without its mark")
    return _CONTROL.sub(" ", text)


def cache_folder() -> Path:
    """Longtake's folder in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "longtake"


def remembered(kind: str, look: Callable[[], Any], *facts: object, whole: Callable[[Any], bool] = bool) -> Any:
    """Return the result of `look`, as JSON: from the user's cache if an earlier call with these facts stored one. kind:
    its folder in the cache; whole: whether a result is worth storing."""
    file = cache_folder() / kind / f"{hashlib.sha256(repr(facts).encode()).hexdigest()}.json"
    with suppress(OSError, ValueError):
        return json.loads(read_small(file))
    found = look()
    with suppress(OSError):
        if whole(found) and file.is_absolute():  # else there is no home
            write_whole(file, json.dumps(found), synced=False)
    return found


@cache
def digest_of_code(*patterns: str) -> str:
    """Of the files of this package whose paths match, for what is `remembered` of what they do."""
    paths = [path for pattern in patterns for path in sorted(_PACKAGE.glob(pattern))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()


def regular(path: Path) -> Path:
    """Return the path of a regular file, or of nothing. Raises OSError for a pipe, whose reader might wait for ever."""
    if path.exists() and not path.is_file():
        raise OSError("it is no regular file")
    return path


def parse_json(text: bytes | str, finite: bool = True) -> Any:
    """Parse a JSON text. Raises ValueError for invalid JSON, for one nested too deep, and if `finite` for Infinity and
    NaN, which Python writes and JSON does not have."""
    try:
        return json.loads(text, parse_constant=_refuse if finite else None)
    except RecursionError:
        raise ValueError("nested too deep") from None


def is_unicode(text: str) -> bool:
    """Return whether a text is free of lone surrogates, which no file in UTF-8 can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_object(path: Path, kinds: Mapping[str, type | tuple[type, ...]], remedy: str) -> dict[str, Any]:
    """Return the JSON object in a file, with values of these `kinds` at least. Raises FileNotFoundError;
    `UserError`, which ends in `remedy`, for anything else."""
    try:
        found = parse_json(read_small(path))
        if not isinstance(found, dict):
            raise ValueError("it holds no JSON object")
        if not is_unicode(json.dumps(found, ensure_ascii=False)):
            raise ValueError("it holds half a character")
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{path}: cannot be read ({reason}); {remedy}") from error
    check_kinds(path, found, kinds, remedy)
    return found


def check_kinds(
    path: Path, found: Mapping[str, Any], kinds: Mapping[str, type | tuple[type, ...]], remedy: str
) -> None:
    """Raise `UserError` where the object in a file has not got values of these kinds."""
    for name, kind in kinds.items():
        value = found.get(name)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise UserError(f"{path}: its {name} is {repr(value)[:40]}; {remedy}")


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")
