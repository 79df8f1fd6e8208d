"""Lists of embedded clips as clip tables: a JSONL whose lines name files of latents, and of each segment's text.

{"vid_emb": "a/0.pt", "text_chunk_emb": ["a/0_0.pt", "a/0_1.pt"]}

The first holds the moments [F, 2 C, h, w] of the latents of a clip, 4 x 8 x 8 pixels each, the others [L, D].
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from longtake.contracts import LatentShape, UserError
from longtake.data.clips.locations import is_url
from longtake.data.probing.folder import state_of
from longtake.data.probing.listing import digest_of, file_state
from longtake.data.tables.convert import lock, user_cache, writable_folder
from longtake.data.tables.json_table import numbered_objects
from longtake.data.tables.table import FOLDER_TABLE, base_folder
from longtake.data.tables.write_rows import write_table

VIDEO, TEXTS = "vid_emb", "text_chunk_emb"
FPS = 16.0  # of the published program's clips
_LATENT = LatentShape(16, 4, 8, causal=True)
_HEAD_BYTES = 1 << 16  # in which the first line says its keys
_READERS = 16  # threads that look at files: on a network disk each look is a wait
_MOST_READ = 16  # files of latents whose numbers are read when a list is opened; of all others only the head
_MOST_FAULTS = 10  # listed in one error


@dataclass(frozen=True)
class Embedded:
    """One line, and the sizes of what is in its files."""

    line: int  # its number in the list, from 1
    path: str
    text: str  # JSON array of the texts' files
    latent_frames: int
    channels: int  # of the moments: twice those of the latents
    rows: int
    columns: int
    text_tokens: int
    text_width: int
    video_type: str  # "float32" ...
    text_type: str

    @property
    def video_shape(self) -> str:
        """Shape and type of the latents."""
        return f"{[self.latent_frames, self.channels, self.rows, self.columns]} of {self.video_type}"

    @property
    def text_shape(self) -> str:
        """Shape and type of each text."""
        return f"{[self.text_tokens, self.text_width]} of {self.text_type}"


def is_embedded(source: Path) -> bool:
    """Whether a file is such a list."""
    if source.suffix.lower() != ".jsonl" or not source.is_file():
        return False
    with open(source, "rb") as file:
        return f'"{VIDEO}"'.encode() in file.read(_HEAD_BYTES)


def embedded_table(source: Path, root: str | os.PathLike[str] | None) -> Path:
    """Return the clip table of a list: made, with the sizes that the files' headers say, or as it was if all is.

    It is `.NAME.longtake.parquet` beside the list, or lies in the user's cache folder where that cannot be written.
    Raises `UserError` that names the lines which cannot be used, with the reasons.
    """
    folder = base_folder(source, root)
    if is_url(os.fspath(folder)):
        raise UserError(
            f"dataset.root = {os.fspath(folder)!r}: embedded clips are read from local files; name a folder"
        )
    lines, folder = list(numbered_objects(source)), Path(folder)
    if faults := [fault for number, line in lines if (fault := _form_fault(number, line))]:
        raise _refused(source, faults)
    table = writable_folder(source.parent.absolute(), user_cache(source)) / f".{source.name}{FOLDER_TABLE}"
    files = [folder / name for _, line in lines for name in (line[VIDEO], *line[TEXTS])]
    with ThreadPoolExecutor(_READERS) as readers:
        state = digest_of([*_names(), str(folder), *map(str, files), *readers.map(file_state, files)])
    if state_of(table) == state:
        return table
    with lock(table.with_suffix(".lock")):
        if state_of(table) != state:
            write_table(_table(source, folder, lines), table, {"folder_state": state})
    return table


def embedded_clips(table: Path) -> list[Embedded] | None:
    """Return the lines of the list that a table was made from, row by row; None for another table."""
    names = _names()
    if table.suffix != ".parquet" or not set(names) <= set(pyarrow.parquet.read_schema(table).names):
        return None
    columns = pyarrow.parquet.read_table(table, columns=names).to_pydict()
    return [Embedded(*row) for row in zip(*(columns[name] for name in names), strict=True)]


def _names() -> list[str]:
    return [field.name for field in fields(Embedded)]


def list_of(table: Path) -> str:
    """Return the name of the list that a table was made from."""
    return table.name.removeprefix(".").removesuffix(FOLDER_TABLE)


def _form_fault(number: int, line: Mapping[str, Any]) -> str | None:
    texts = line.get(TEXTS)
    if not isinstance(line.get(VIDEO), str):
        return f"line {number} has no file {VIDEO}"
    if not isinstance(texts, list) or not texts or not all(isinstance(name, str) for name in texts):
        return f"line {number} has no list of files {TEXTS}"
    return None


def _refused(source: Path, faults: list[str], folder: Path | None = None) -> UserError:
    more = f"; and {len(faults) - _MOST_FAULTS} more" if len(faults) > _MOST_FAULTS else ""
    where = "" if folder is None else f" (files are those of {folder})"
    return UserError(f"{source}: {'; '.join(faults[:_MOST_FAULTS])}{more}{where}; fix these lines, or take them out")


def _table(source: Path, folder: Path, lines: list[tuple[int, dict[str, Any]]]) -> pa.Table:
    with ThreadPoolExecutor(_READERS) as readers:
        found = list(readers.map(lambda line: _looked_at(folder, *line), lines))
    faults = [one for one in found if isinstance(one, str)] or _out_of_range(folder, lines)
    if faults:
        raise _refused(source, faults, folder)
    names = _names()
    rows = [astuple(one) for one in found if isinstance(one, Embedded)]
    if not rows:
        raise UserError(f"{source}: is empty; write a line for each clip")
    columns: dict[str, Any] = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
    columns["num_frames"] = [_LATENT.pixel_frames(frames) for frames in columns["latent_frames"]]
    for name, cells in (("height", columns["rows"]), ("width", columns["columns"])):
        columns[name] = [count * _LATENT.spatial for count in cells]
    columns["fps"] = np.full(len(rows), FPS)
    return pa.table(columns)


def _out_of_range(folder: Path, lines: list[tuple[int, dict[str, Any]]]) -> list[str]:
    """Of lines evenly spread, those whose latents have finite numbers that no autoencoder gives, such as bytes of
    pixels; NaN and infinity cost their samples when these are read."""
    from longtake.data.latents.source import LARGEST_LATENT, UnusableLatents, check_numbers, load_tensor

    faults = []
    for place in np.unique(np.linspace(0, len(lines) - 1, min(len(lines), _MOST_READ)).astype(int)).tolist():
        number, line = lines[place]
        try:
            tensor = load_tensor(folder / line[VIDEO])
            check_numbers(line[VIDEO], tensor.nan_to_num(0, 0, 0), LARGEST_LATENT)
        except UnusableLatents as error:
            faults.append(f"line {number}: {error}")
    return faults


def _looked_at(folder: Path, number: int, line: Mapping[str, Any]) -> Embedded | str:
    """Return a line with the sizes of what is in its files; or what is wrong with it."""
    from longtake.data.latents.source import UnusableLatents  # with torch

    try:
        video, video_type = _shape(folder / line[VIDEO], is_latent=True)
        each = [_shape(folder / name) for name in line[TEXTS]]
    except UnusableLatents as error:
        return f"line {number}: {error}"
    if len(video) != 4 or video[1] % 2:
        wanted = "[frames, 2 x channels, rows, columns]"
        return f"line {number}: {VIDEO} has the shape {list(video)}, not {wanted}, of {video_type}"
    first, text_type = each[0]
    for place, (text, kind) in enumerate(each):
        if len(text) != 2 or text != first:
            wanted = "[tokens, width]" if len(text) != 2 else f"{list(first)} as the first of the line"
            return f"line {number}: {TEXTS}[{place}] has the shape {list(text)}, not {wanted}, of {kind}"
    return Embedded(number, line[VIDEO], json.dumps(line[TEXTS]), *video, *first, video_type, text_type)


def _shape(path: Path, is_latent: bool = False) -> tuple[tuple[int, ...], str]:
    """Shape and type of the tensor in a file, whose numbers are not read where it is mapped. Raises
    `UnusableLatents`."""
    from longtake.data.latents.source import UnusableLatents, load_tensor

    tensor = load_tensor(path, mapped=True)
    kind = str(tensor.dtype).removeprefix("torch.")
    if not tensor.is_floating_point():
        what = "the moments that the autoencoder gives" if is_latent else "the text encoder's output"
        raise UnusableLatents(
            f"{path.name}: numbers are of {kind}, expected float16, bfloat16, float32 or float64: {what}"
        )
    return tuple(tensor.shape), kind
