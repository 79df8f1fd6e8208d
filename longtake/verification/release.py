"""Released weights: found here, or downloaded to where the run expects them, and compared with the hub's checksums."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from longtake.contracts import UserError
from longtake.hub import download_published, is_hub_name
from longtake.system.config import SystemConfig
from longtake.system.encoders import denoiser_keys, encoder_sections, find_encoders
from longtake.system.pretrained import means_checkpoint
from longtake.weights.files import find_denoiser

_SHA256 = re.compile(r"[0-9a-f]{64}")


def weight_keys(config: SystemConfig) -> dict[str, str]:
    """Return the config keys that name weights, with their values."""
    named: dict[str, str | None] = {**denoiser_keys(config)}
    for key in encoder_sections(config):
        named[f"{key}.from_pretrained"] = getattr(getattr(config, key), "from_pretrained", None)
    return {key: value for key, value in named.items() if value is not None}


def download_missing(config: SystemConfig) -> bool:
    """Download the weights that are not on this machine; return whether any have come to a path that the config
    names, which may say more of the model. Raises `UserError` where they cannot be had."""
    downloads = [download_published(value, key) for key, value in weight_keys(config).items()]
    for key, spec in denoiser_keys(config).items():
        if not means_checkpoint(spec):
            find_denoiser(spec, key)
    find_encoders(config)
    return any(downloads)


def public_name(value: str | None) -> str:
    """Name in a record of the weights of a config value: their name on the hub, or only their kind."""
    if value is None:
        return "none"
    local = Path(value).expanduser()
    if is_hub_name(value) and not local.exists():
        return value
    return "local folder" if local.is_dir() else "local file"


def checksum(files: Iterable[Path]) -> str | None:
    """Return the SHA-256 of a file, of several files that of their checksums; None without files.

    Raises `UserError` for a file that differs from what the hub's client has noted of it.
    """
    sums = []
    for file in files:
        with file.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        expected = _noted_checksum(file)
        if expected not in (None, found):
            raise UserError(
                f"{file.name}: its contents differ from the hub's (SHA-256 {found[:12]}..., expected "
                f"{expected[:12]}...); delete it and download it again"
            )
        sums.append(found)
    if len(sums) < 2:
        return sums[0] if sums else None
    return hashlib.sha256("".join(sums).encode()).hexdigest()


def _noted_checksum(file: Path) -> str | None:
    """Return the hub client's checksum of a file: the name of the blob in its cache, or a note next to a
    local folder."""
    blob = file.resolve().name
    if file.is_symlink() and _SHA256.fullmatch(blob):
        return blob
    for folder in file.absolute().parents[:4]:
        inner = file.absolute().relative_to(folder)
        note = folder / ".cache" / "huggingface" / "download" / f"{inner}.metadata"
        if note.is_file():
            lines = note.read_text(encoding="utf-8").splitlines()
            etag = lines[1].strip() if len(lines) > 1 else ""
            return etag if _SHA256.fullmatch(etag) else None
    return None
