"""Where a clip lies: the path of a file, or a URL of any protocol that fsspec knows (`s3://`, `https://` ...)."""

from __future__ import annotations

import os
import re
from urllib.parse import urlsplit

from longtake.contracts import UserError

_URL = re.compile(r"(?:[a-z][a-z0-9+.-]*::)*[a-z][a-z0-9+.-]*://", re.IGNORECASE)


def is_url(location: str) -> bool:
    """Whether a location names a protocol (`s3://...`), also `file://`."""
    return _URL.match(location) is not None


def join_location(root: str | os.PathLike[str], path: str) -> str:
    """Return a path as a table has it, starting from `root`, either of which may be a URL; URLs and absolute paths
    stay.

    A relative path is the name of a file: below a web address, what has a meaning there (`%`, `#`, `?`) is escaped.
    """
    if is_url(path) or os.path.isabs(path):
        return path
    start = os.fspath(root)
    if not is_url(start):
        return os.path.join(start, path)
    if start.rsplit("::", 1)[-1].lower().startswith(("http://", "https://")):
        path = path.replace("%", "%25").replace("#", "%23").replace("?", "%3F")  # the rest is done when it is asked for
    return f"{start.rstrip('/')}/{path}"


def refuse_url(table: str | os.PathLike[str]) -> None:
    """Raise `UserError` for a table or folder given as a URL, also one that a `Path` has robbed of a slash."""
    name = os.fspath(table)
    found = re.match(r"([a-z][a-z0-9+.:-]+):/+(?=[^/])", name, re.IGNORECASE)
    if found and not os.path.lexists(f"{found[1]}:"):  # a folder may be called so
        url = f"{found[1]}://{name[found.end() :]}"
        raise UserError(
            f"{url}: a table must lie on this machine, and so must a folder of clips; fetch the table (its paths, "
            "dataset.root and --root may be URLs)"
        )


def file_name(location: str) -> str:
    """Return the location without what a web address has behind its path (`?...`), so that its suffix is the file's."""
    return urlsplit(location).path if location.lower().startswith(("http://", "https://")) else location
