"""Files by name: a local path, or the Hugging Face hub's cache, which the hub fills where it is open."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longtake.contracts import UserError, in_one_line
from longtake.presets import PUBLISHED, WEIGHTS
from longtake.small_files import parse_json, read_small

_FILES = (".safetensors", ".pth")
_TOKENIZERS = {
    "text_encoder": "tokenizer/*",
    "models_t5_umt5-xxl-enc-bf16.pth": "google/umt5-xxl/*",
}  # of text encoders
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(/[\w./-]+\.(safetensors|pth))?")


def is_hub_name(name: str) -> bool:
    """Return whether `name` may be a repository, or a file in one: `owner/name`, `owner/name/file.safetensors` or a
    `.pth`. The weights that presets name are in the folder `ckpts`, which is not an owner."""
    is_local_file = name.count("/") == 1 and name.endswith(_FILES)
    return bool(_HUB_NAME.fullmatch(name)) and not name.startswith((".", f"{WEIGHTS}/")) and not is_local_file


def published_facts(name: str, file: str = "config.json") -> dict[str, Any] | None:
    """Return the JSON object `file` in a local folder of weights, or beside a local file of them; None where there is
    none.

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


def tensor_names(name: str, stem: str = "diffusion_pytorch_model") -> frozenset[str]:
    """Return the names of the tensors in a local folder of weights in diffusers' layout, from its index or the
    header of its one file; none where there is neither, or it is damaged, which reading the weights reports."""
    index = published_facts(name, f"{stem}.safetensors.index.json")
    if index is not None:
        return frozenset(index.get("weight_map", {}))
    file = Path(name).expanduser() / f"{stem}.safetensors"
    if not file.is_file():
        return frozenset()
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np") as tensors:
            return frozenset(tensors.keys())
    except (SafetensorError, OSError):
        return frozenset()


@dataclass(frozen=True)
class PublishedHome:
    """Hub source of a file or folder that presets name: `files` (patterns) of a repository, and their local folder."""

    repository: str
    folder: Path
    files: tuple[str, ...]

    @property
    def command(self) -> str:
        """The command that downloads it."""
        of_file = len(self.files) == 1 and "*" not in self.files[0]
        chosen = f" {self.files[0]}" if of_file else "".join(f" --include '{pattern}'" for pattern in self.files)
        return f"hf download {self.repository}{chosen} --local-dir {self.folder}"


def published_home(local: Path) -> PublishedHome | None:
    """Return the hub repository and files of a local path that is published, by its name or that of a folder around
    it; None where that is not known."""
    for place in (local, *local.parents):
        if (repository := PUBLISHED.get(place.name)) is None:
            continue
        if place.suffix in _FILES:
            return PublishedHome(repository, place.parent, (place.name,)) if place == local else None
        inner = local.relative_to(place).as_posix()
        files = ("*",) if inner == "." else (inner if local.suffix in _FILES else f"{inner}/*",)
        tokenizer = (_TOKENIZERS[inner],) if inner in _TOKENIZERS else ()
        return PublishedHome(repository, place, files + tokenizer)
    return None


def download_published(name: str, key: str) -> bool:
    """Download what presets name by a local path to that path; return whether that was done. Not where it is there
    already, or where it is published is not known. Raises `UserError` where the hub cannot be used."""
    local = Path(name).expanduser()
    home = None if is_hub_name(name) else published_home(local)
    if home is None or local.exists():
        return False
    place, get = f"{key} = {name!r}: is not on this machine", f"run `{home.command}` where there is access"
    if _is_offline():
        raise UserError(f"{place}, and hub access is off (HF_HUB_OFFLINE); unset that, or {get} and copy it here")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        raise UserError(
            f"{place}, and huggingface_hub is not installed; pip install '.[encoders]' in Longtake's folder"
        ) from None
    try:
        snapshot_download(home.repository, local_dir=home.folder, allow_patterns=list(home.files))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise UserError(f"{place}, and cannot be downloaded ({in_one_line(error)}); {get} and copy it here") from None
    if not local.exists():
        raise UserError(f"{place}, and {home.repository} has no such file; set {key} to where the weights are")
    return True


def find_files(name: str, key: str, wanted: Sequence[Sequence[str]], cache_dir: str | None = None) -> Path:
    """Return the local file or folder that `name` stands for.

    `name`: a path, or weights on the hub as `owner/name` or `owner/name/file.safetensors`. What is not in the cache is
    fetched, unless HF_HUB_OFFLINE is set. `wanted`: what a folder may be, each as patterns of its files of which the
    last must be there; the first that is found is taken. `key` is the config key that says so, for messages. Raises
    `UserError` that says what is missing, where it was looked for and how to get it.
    """
    local = Path(name).expanduser()
    if local.exists():
        return local
    if not is_hub_name(name):
        home = published_home(local)
        get = f"`{home.command}`" if home else "download the weights there"
        raise UserError(
            f"{key} = {name!r}: no such file or folder (looked for {local.absolute()}); {get}, "
            "or name them as on the Hugging Face hub: owner/name, or owner/name/file.safetensors"
        )
    try:
        import huggingface_hub  # noqa: F401 (only to report its absence)
    except ImportError as error:
        raise UserError(
            f"{key} = {name!r}: is no file or folder here, and to look on the Hugging Face hub needs a library that is "
            f"not installed ({error.name or error}); pip install '.[encoders]' in Longtake's folder"
        ) from None
    owner, repository, *file = name.split("/", 2)
    return _from_hub(f"{owner}/{repository}", file, wanted, key, name, cache_dir)


def may_be_fetched(name: str) -> bool:
    """Return True where weights of this name may come from the hub."""
    return not _is_offline() and (is_hub_name(name) or published_home(Path(name).expanduser()) is not None)


def _is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "") in ("1", "true", "True", "ON", "YES")


def _from_hub(
    repository: str, file: Sequence[str], wanted: Sequence[Sequence[str]], key: str, name: str, cache_dir: str | None
) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    cache = cache_dir or constants.HF_HUB_CACHE
    offline = constants.HF_HUB_OFFLINE or _is_offline()
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
