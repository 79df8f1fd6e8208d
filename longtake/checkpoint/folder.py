"""The checkpoint folder: its names, its COMPLETE marker, and the checks that stand before every read.

    outputs/<run>/epoch{E}-global_step{N}/
      shard-00001-model-00001-of-00003.safetensors   one or more per rank and part (model, ema, optim)
      run.json                                       everything that is not a tensor
      COMPLETE                                       JSON: size and CRC-32 of each file above; written last
    outputs/<run>/frozen/                            the same, once: tensors that are not trained and have no file

A folder without COMPLETE does not exist. A save works in `<name>.partial` and renames it when COMPLETE is in it, a
removal renames it back first, so whatever a killed process leaves behind is never taken for a checkpoint, and the run's
next start or save removes it. A checkpoint that a run found damaged is kept as `<name>.damaged`.

CRC-32 guards against disks and copies, not against an attacker; zlib's runs at 7 GB/s on one core where BLAKE2b
makes 1.4, so that it costs less than reading the file.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtake.checkpoint.writer import BLOCK_BYTES, MARKER, STATE_FILE
from longtake.contracts import UserError
from longtake.small_files import parse_json, read_small

if TYPE_CHECKING:
    from longtake.parallel.world import World

FORMAT_VERSION = 1
SHARD_SUFFIX = ".safetensors"
PARTIAL_SUFFIX = ".partial"
LOW_NOISE = "low_noise_"  # before the names of the tensors of a second denoiser
FROZEN_FOLDER = "frozen"
_NAME = re.compile(r"epoch(\d+)-global_step(\d+)")


@dataclass(frozen=True)
class FileRecord:
    """What COMPLETE says about one file."""

    num_bytes: int
    crc32: str  # eight hexadecimal digits
    head_crc32: str | None  # of a safetensors file's head; None for run.json


@dataclass(frozen=True)
class Marker:
    """The content of COMPLETE."""

    epoch: int
    step: int
    world_size: int  # ranks that wrote it; any number can read it
    saved_at: datetime  # UTC
    files: Mapping[str, FileRecord]

    @property
    def num_bytes(self) -> int:
        """Bytes of all listed files."""
        return sum(record.num_bytes for record in self.files.values())


def checkpoint_path(run_folder: str | Path, epoch: int, step: int) -> Path:
    """Where the checkpoint of (epoch, global step) lies in its run folder."""
    return Path(run_folder) / f"epoch{epoch}-global_step{step}"


def parse_name(name: str) -> tuple[int, int] | None:
    """`(epoch, step)` of a folder name, or None where it is not a checkpoint's."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def is_complete(folder: str | Path) -> bool:
    """Whether `folder` holds a readable COMPLETE marker. Says nothing about damage done later: see `verify`."""
    try:
        read_marker(folder, any_version=True)
    except UserError:
        return False
    return True


def read_marker(folder: str | Path, any_version: bool = False) -> Marker:
    """Read COMPLETE. Raises UserError where it is missing, unreadable, or (unless `any_version`) of another format."""
    folder = Path(folder)
    try:
        content = parse_json(read_small(folder / MARKER))
        version = int(content["format_version"])
        if version != FORMAT_VERSION and not any_version:
            raise UserError(
                f"{folder}: has checkpoint format {version}, this version of longtake reads format {FORMAT_VERSION}; "
                "load it with the version that wrote it"
            )
        files = {
            name: FileRecord(int(f["num_bytes"]), str(f["crc32"]), f.get("head_crc32"))
            for name, f in content["files"].items()
        }
        numbers = {key: int(content[key]) for key in ("epoch", "step", "world_size")}
        marker = Marker(**numbers, saved_at=datetime.fromisoformat(content["saved_at"]), files=files)
    except UserError:
        raise
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(_why_missing(folder)) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise UserError(
            f"{folder / MARKER}: cannot be read ({error}); the checkpoint is damaged, choose another one"
        ) from error
    if any(Path(name).name != name for name in marker.files):
        raise UserError(f"{folder / MARKER}: lists a file outside its folder; the checkpoint has been tampered with")
    return marker


def _why_missing(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder}: there is no such folder; give a checkpoint folder such as epoch0-global_step100"
    if parse_name(folder.name.removesuffix(PARTIAL_SUFFIX)):
        return f"{folder}: has no {MARKER} file, so its save or its removal was cut off; choose another checkpoint"
    return f"{folder}: is not a checkpoint, it has no {MARKER} file; give a folder such as epoch0-global_step100"


def read_state(folder: str | Path) -> dict[str, Any]:
    """Return the dict that was handed to `save_checkpoint`, from run.json (tuples come back as lists).

    Raises UserError where the checkpoint is not complete, of another format, or run.json is damaged.
    """
    folder = Path(folder)
    marker = read_marker(folder)
    faults = check_files(folder, marker, [STATE_FILE])
    if faults:
        raise UserError(damage_sentence(folder, faults))
    try:
        state = parse_json((folder / STATE_FILE).read_bytes(), finite=False)
        if not isinstance(state, dict):
            raise ValueError("it is not an object")
        state.pop("format_version")
    except (ValueError, KeyError) as error:
        raise UserError(damage_sentence(folder, [f"{STATE_FILE} is no state of a run ({error})"])) from error
    return state


def verify(folder: str | Path) -> list[str]:
    """Every fault of a checkpoint, one sentence each; an empty list means that it is whole. Reads all its bytes."""
    folder = Path(folder)
    try:
        marker = read_marker(folder)
    except UserError as error:
        return [str(error)]
    return check_files(folder, marker, marker.files) + unlisted_shards(folder, marker)


def check_all(folder: Path, world: World) -> list[str]:
    """`verify`, its files shared out among the ranks. Collective. Raises UserError as `read_marker`."""

    def share() -> list[str]:
        marker = read_marker(folder)
        faults = check_files(folder, marker, sorted(marker.files)[world.rank :: world.size])
        return faults + (unlisted_shards(folder, marker) if world.is_main else [])

    return [fault for faults in world.gather(world.on_all(share)) for fault in faults]


def glance(folder: str | Path) -> list[str]:
    """`verify` in milliseconds: presence and size of every file, run.json, and the heads of the tensor files."""
    folder = Path(folder)
    try:
        marker = read_marker(folder, any_version=True)
    except UserError as error:
        return [str(error).removeprefix(f"{folder}: ").split(";")[0]]
    return check_files(folder, marker, marker.files, heads=True) + unlisted_shards(folder, marker)


def check_files(folder: Path, marker: Marker, names: Iterable[str], heads: bool = False) -> list[str]:
    """Compare the named files with what COMPLETE says of them: presence, size, then CRC-32.

    `heads`: of a tensor file the CRC-32 of its head only.
    """
    faults = []
    for name in names:
        record, path = marker.files.get(name), folder / name
        if record is None:
            faults.append(f"{name} is not listed in {MARKER}")
            continue
        try:
            size = path.stat().st_size
            if size != record.num_bytes:
                faults.append(f"{name} has {size:,} bytes instead of {record.num_bytes:,}")
            elif heads and path.suffix == SHARD_SUFFIX:
                if record.head_crc32 != _head_crc32(path):
                    faults.append(f"{name} has a damaged head")
            elif (found := crc32_of(path)) != record.crc32:
                faults.append(f"{name} has checksum {found} instead of {record.crc32}")
        except FileNotFoundError:
            faults.append(f"{name} is missing")
        except OSError as error:
            faults.append(f"{name} cannot be read ({error.strerror})")
    return faults


def unlisted_shards(folder: Path, marker: Marker) -> list[str]:
    """Tensor files that COMPLETE does not know: they would be read along with the others."""
    found = sorted(path.name for path in folder.glob("*" + SHARD_SUFFIX))
    return [f"{name} is not listed in {MARKER}" for name in found if name not in marker.files]


def damage_sentence(folder: Path, faults: list[str]) -> str:
    """One sentence for the user about a damaged checkpoint; it names the newest other one of the run that is whole."""
    more = f" and {len(faults) - 3} more faults" if len(faults) > 3 else ""
    others = [path for path in folder.parent.glob("epoch*-global_step*") if path != folder and parse_name(path.name)]
    newest_first = sorted(others, key=lambda path: parse_name(path.name)[::-1], reverse=True)
    newest = next((path for path in newest_first if not glance(path)), None)
    instead = "" if newest is None else f", such as {newest}"
    return f"{folder}: is damaged: {', '.join(faults[:3])}{more}; choose another checkpoint{instead}"


def _head_crc32(path: Path) -> str:
    """Of a safetensors file's head: its length in 8 bytes, then as many bytes of JSON."""
    with path.open("rb") as stream:
        size = stream.read(8)
        rest = stream.read(min(int.from_bytes(size, "little"), path.stat().st_size))
    return f"{zlib.crc32(rest, zlib.crc32(size)):08x}"


def crc32_of(path: Path) -> str:
    """CRC-32 of a file's content as eight hexadecimal digits."""
    value = 0
    with path.open("rb", buffering=0) as stream:
        while block := stream.read(BLOCK_BYTES):
            value = zlib.crc32(block, value)
    return f"{value:08x}"
