"""Files by name: a local path, or the Hugging Face hub's cache, which the hub fills where it is open."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longtake.contracts import UserError, in_one_line
from longtake.presets import PUBLISHED
from longtake.small_files import parse_json, read_small

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(/[\w./-]+\.(safetensors|pth))?")


def is_hub_name(name: str) -> bool:
    """Whether `name` may be a repository, or a file in one: `owner/name`, `owner/name/file.safetensors` or a
    `.pth`."""
    is_local_file = name.count("/") == 1 and name.endswith((".safetensors", ".pth"))
    return bool(_HUB_NAME.fullmatch(name)) and not name.startswith(".") and not is_local_file


def published_facts(name: str, file: str = "config.json") -> dict[str, Any] | None:
    """The JSON object `file` in a local folder of weights, or beside a local file of them; None where there is none.

    Raises `UserError` for a damaged one.
    """
    local = Path(name).expanduser()
    path = (local if local.is_dir() else local.parent) / file
    if not local.exists() or not path.is_file():
        return None
    try:
        return dict(parse_json(read_small(path)))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path}: cannot be read ({in_one_line(error)}); copy it again") from None


def find_files(name: str, key: str, wanted: Sequence[Sequence[str]], cache_dir: str | None = None) -> Path:
    """The local file or folder that `name` stands for.

    `name`: a path, or weights on the hub as `owner/name` or `owner/name/file.safetensors`. What is not in the cache is
    fetched, unless HF_HUB_OFFLINE is set. `wanted`: what a folder may be, each as patterns of its files of which the
    last must be there; the first that is found is taken. `key` is the config key that says so, for messages. Raises
    `UserError` that says what is missing, where it was looked for and how to get it.
    """
    local = Path(name).expanduser()
    if local.exists():
        return local
    if not is_hub_name(name):
        home = PUBLISHED.get(local.name)
        get = f"`hf download {home} {local.name} --local-dir {local.parent}`" if home else "download the weights there"
        raise UserError(
            f"{key} = {name!r}: no such file or folder (looked for {local.absolute()}); {get}, "
            "or name them as on the Hugging Face hub: owner/name, or owner/name/file.safetensors"
        )
    try:
        import huggingface_hub  # noqa: F401 (only to report its absence)
    except ImportError as error:
        raise UserError(
            f"{key} = {name!r}: is no file or folder here, and to look on the Hugging Face hub needs a library that is "
            f"not installed ({error.name or error}); pip install 'longtake[encoders]'"
        ) from None
    owner, repository, *file = name.split("/", 2)
    return _from_hub(f"{owner}/{repository}", file, wanted, key, name, cache_dir)


def _from_hub(
    repository: str, file: Sequence[str], wanted: Sequence[Sequence[str]], key: str, name: str, cache_dir: str | None
) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    cache = cache_dir or constants.HF_HUB_CACHE
    offline = constants.HF_HUB_OFFLINE or os.environ.get("HF_HUB_OFFLINE", "") in ("1", "true", "True", "ON", "YES")
    why = "hub access is off (HF_HUB_OFFLINE)"
    names = " or ".join(patterns[-1] for patterns in wanted)
    lacking = "no such file" if file else f"no {names} (another file is named with it: {repository}/FILE.safetensors)"
    for patterns in (tuple(file),) if file else wanted:
        for only_local in (True, False):
            if not only_local and offline:
                continue
            try:
                folder = snapshot_download(
                    repository, cache_dir=cache_dir, allow_patterns=list(patterns), local_files_only=only_local
                )
            except LocalEntryNotFoundError as error:
                why = why if offline else f"the hub cannot be reached ({in_one_line(error)})" if not only_local else why
                continue
            except RepositoryNotFoundError:
                why = "the hub has no such repository, or wants you to log in for it (`hf auth login`)"
                continue
            except (HfHubHTTPError, OSError, ValueError) as error:
                why = f"the hub does not give it ({in_one_line(error)})"
                continue
            found = Path(folder, *file)
            if found.exists() if file else any(found.glob(patterns[-1])):
                return found
            why = why if offline else f"the repository has {lacking}"
    wish = " ".join([repository, *file])
    raise UserError(
        f"{key} = {name!r}: is neither a path (looked for {Path(name).absolute()}) nor in the Hugging Face cache "
        f"({cache}), and {why}; run `hf download {wish}` where there is access, with HF_HOME on a disk that this "
        f"machine sees, or set {key} to the folder that holds the files"
    )
