"""What a file holds, read from its container without decoding, and the same for a whole table."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import av
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet
from PIL import Image

from longtake.contracts import UserError
from longtake.data.pool import call_each
from longtake.data.table import base_folder, compute_clip_ids, id_column, read_columns, text_column
from longtake.data.video import ClipError, check_file, is_countable, is_image, open_video, reason_of

_EXIF_ORIENTATION = 0x0112
_MADE = ("num_frames", "height", "width", "aspect_ratio", "resolution", "fps")


@dataclass(frozen=True)
class ClipInfo:
    """What a reader of the file will get: sizes are those of the upright picture."""

    num_frames: int  # 1 for a still
    height: int
    width: int
    fps: float  # frames per second rounded to 3 decimals; NaN for stills and where the container does not say
    duration: float  # seconds; NaN where unknown
    codec: str  # "h264", "jpeg" ...


def probe_file(path: str | os.PathLike[str]) -> ClipInfo:
    """Reads what the container says about a video or a still; pixels are decoded only where nothing else is exact.

    The frame count is the header's where the file's index agrees with it; else packets are counted; formats in which
    packets are not frames (AVI, VP8, transport streams ...) are decoded. Raises `ClipError`, also for an MP4 whose
    index reaches beyond the file's end; a still cut short is not noticed here but when it is read.
    """
    if is_image(path):
        return _probe_image(os.fspath(path))
    with open_video(path) as (container, stream):
        count, rotated = _count_frames(path, container, stream)
        if count < 1:
            raise ClipError("no video frames")
        height, width = stream.codec_context.height, stream.codec_context.width
        if min(height, width) < 1:
            raise ClipError("the frame size is unknown")
        rate = stream.average_rate or stream.guessed_rate
        if (
            stream.codec_context.name == "gif" and stream.duration
        ):  # delays of 4, 4 and 5/100 s are said to be 25 a second
            rate = count / (stream.duration * stream.time_base)
        fps = round(float(rate), 3) if rate else math.nan
        if stream.duration and stream.time_base:
            duration = float(stream.duration * stream.time_base)
        else:
            duration = count / fps if fps > 0 else math.nan
        if rotated:
            height, width = width, height
        return ClipInfo(count, height, width, fps, duration, stream.codec_context.name)


def _probe_image(path: str) -> ClipInfo:
    check_file(path)
    try:
        with Image.open(path) as image:
            width, height = image.size
            if image.getexif().get(_EXIF_ORIENTATION, 1) >= 5:  # 5 to 8 lie on their side
                height, width = width, height
            return ClipInfo(1, height, width, math.nan, math.nan, (image.format or "").lower())
    except Exception as error:  # Pillow lets any kind through on damaged files
        raise ClipError(f"cannot be read: {reason_of(error)}") from error


def _count_frames(
    path: str | os.PathLike[str], container: av.container.InputContainer, stream: av.video.stream.VideoStream
) -> tuple[int, bool]:
    """The number of frames, and whether they are shown on their side."""
    if not is_countable(container, stream) and stream.codec_context.name != "gif":
        return _count_by_decoding(container, stream)
    if "mp4" in container.format.name:
        with open(path, "rb") as file:
            rotated = _lies_on_its_side(file, stream.id)
        index = stream.index_entries
        if len(index) and index[-1].pos + index[-1].size > os.path.getsize(path):
            raise ClipError("cut short: its index reaches beyond the end of the file")
        if len(index) == stream.frames > 0 and not index[0].is_discard:
            return stream.frames, rotated
        return sum(packet.size > 0 and not packet.is_discard for packet in container.demux(stream)), rotated
    count, first = 0, None  # Matroska keeps a rotation that PyAV shows only on a decoded frame
    for packet in container.demux(stream):
        if first is None:
            first = next(iter(packet.decode()), None)
        count += packet.size > 0 and not packet.is_discard
    return count, first is not None and _is_quarter_turn(first)


def _count_by_decoding(container: av.container.InputContainer, stream: av.video.stream.VideoStream) -> tuple[int, bool]:
    count, rotated = 0, False
    for frame in container.decode(stream):
        rotated = rotated or (count == 0 and _is_quarter_turn(frame))
        count += 1
    return count, rotated


def _is_quarter_turn(frame: av.VideoFrame) -> bool:
    return round(frame.rotation / 90) % 2 == 1


def _lies_on_its_side(file: BinaryIO, track: int) -> bool:
    """Whether the display matrix of an MP4 track (box moov/trak/tkhd, ISO 14496-12 §8.3.2) is a quarter turn."""
    size = os.fstat(file.fileno()).st_size
    for start, end in _boxes(file, b"moov", 0, size):
        for trak in _boxes(file, b"trak", start, end):
            for header, _ in _boxes(file, b"tkhd", *trak):
                file.seek(header)
                data = file.read(96)
                fields = 32 if data[:1] == b"\1" else 20  # version 1 has 64-bit times
                if len(data) < fields + 56:
                    return False
                track_at = 4 + (16 if fields == 32 else 8)
                if struct.unpack_from(">I", data, track_at)[0] == track:
                    a, b = struct.unpack_from(">ii", data, 4 + fields + 16)
                    return abs(b) > abs(a)
    return False


def _boxes(file: BinaryIO, kind: bytes, start: int, end: int) -> list[tuple[int, int]]:
    """Where the contents of all boxes of one kind begin and end, between two places of an MP4 file."""
    found = []
    while start + 8 <= end:
        file.seek(start)
        header = file.read(16)
        if len(header) < 8:
            break
        size, name, skip = *struct.unpack_from(">I4s", header), 8
        if size == 1 and len(header) == 16:
            size, skip = struct.unpack_from(">Q", header, 8)[0], 16
        elif size == 0:  # to the end of the file
            size = end - start
        if size < skip:
            break
        if name == kind:
            found.append((start + skip, min(start + size, end)))
        start += size
    return found


@dataclass(frozen=True)
class ProbeResult:
    """What came of probing a table."""

    kept: int  # rows written
    bad: int  # rows left out
    bad_rows: tuple[tuple[int, str, str], ...]  # (row of the source, path as written, reason), in order
    bad_path: Path | None  # the list of bad rows; None where there is none


def probe_table(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    workers: int = 0,
    root: str | os.PathLike[str] | None = None,
    strict: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> ProbeResult:
    """Probes every clip of a table and writes the completed one; the suffixes choose CSV, Parquet or Arrow.

    `source` needs a column path; text is empty where missing; other columns are kept. Made, or made anew: num_frames,
    height, width, aspect_ratio (height / width), resolution (height x width), fps; clip_id if not there. Rows keep
    their order. A file that cannot be used costs its row: it is listed with the reason in `<target stem>.bad.csv`
    beside the target. With `strict` any bad file, and without it a table of bad files only, is a `UserError`, and only
    the list is written.

    Relative paths that start elsewhere than in the target's folder are rewritten to start there; made clip ids are
    those of the paths as the target has them.

    `workers`: processes, 0 in this one; a decoder that crashes takes its file along, not the run. `root`: as in
    `ClipTable.open`. `progress(done, total)` is called as files are finished. Output files are complete or absent.
    """
    source, target = Path(source), Path(target)
    _check_target(source, target)
    columns = read_columns(source, as_text=True)
    if "path" not in columns.column_names:
        found = ", ".join(columns.column_names) or "no column"
        raise UserError(f"{source}: column path is missing (found {found}); it names the file of each clip")
    if not len(columns):
        raise UserError(f"{source}: the table has no rows; list one clip a row with its path and text")
    columns = _checked(columns, source, target)
    paths = columns["path"].to_pylist()
    folder = base_folder(source, root)
    files = [str(folder / path) if path else "" for path in paths]
    outcomes = call_each(_probe_outcome, files, workers, progress)
    kept = np.array([isinstance(outcome, ClipInfo) for outcome in outcomes], dtype=bool)
    bad = tuple((row, paths[row], str(outcomes[row])) for row in np.flatnonzero(~kept).tolist())
    bad_path = _write_bad(target, bad)
    if strict and bad:
        raise UserError(
            f"{source}: {len(bad)} of {len(paths)} clips cannot be used, listed in {bad_path} (the first: {bad[0][1]}: "
            f"{bad[0][2]}); mend or leave out their rows, or probe without --strict"
        )
    if not kept.any():
        raise UserError(
            f"{source}: no clip is usable, all {len(paths)} are listed with the reason in {bad_path} (the first: "
            f"{bad[0][1]}: {bad[0][2]}); relative paths start from {folder.absolute()}, which --root changes"
        )
    infos = [outcome for outcome in outcomes if isinstance(outcome, ClipInfo)]
    paths = _moved(paths, folder, target.parent)
    write_columns(_completed(columns, paths, kept, infos, typed=target.suffix.lower() != ".csv"), target)
    return ProbeResult(len(infos), len(bad), bad, bad_path)


def _check_target(source: Path, target: Path) -> None:
    if target.suffix.lower() not in _WRITERS:
        raise UserError(f"{target}: tables end in .csv, .parquet or .arrow, not {target.suffix or 'nothing'!r}")
    if target.exists() and source.exists() and target.samefile(source):
        raise UserError(f"{target}: would overwrite the table it is made from; give the output another name")


def _checked(columns: pa.Table, source: Path, target: Path) -> pa.Table:
    """The table with path and text as texts (never null) and clip_id as uint64, before hours are spent on its files."""
    for name in ("path", "text", "clip_id"):
        if name in columns.column_names:
            if name == "clip_id":
                values = pa.array(id_column(columns, source))
            else:
                values = pc.fill_null(text_column(columns, name, source).cast(pa.string()), "")
            columns = columns.set_column(columns.column_names.index(name), name, values)
    if target.suffix.lower() == ".csv":
        for name in columns.column_names:
            try:
                pyarrow.csv.write_csv(columns.select([name]).slice(0, 1), pa.BufferOutputStream())
            except pa.ArrowException as error:
                raise UserError(
                    f"{source}: column {name} holds {columns[name].type}, which a .csv cannot hold; "
                    f"write {target.with_suffix('.parquet')}, or leave the column out"
                ) from error
    return columns


def _moved(paths: Sequence[str], old: Path, new: Path) -> list[str]:
    """Paths that start from folder `old`, written so that they start from folder `new`."""
    start, end = os.path.realpath(old), os.path.realpath(new)
    if start == end:
        return list(paths)
    return [
        path if not path or os.path.isabs(path) else os.path.relpath(os.path.join(start, path), end) for path in paths
    ]


def _probe_outcome(path: str) -> ClipInfo | str:
    """A file's info, or the reason why it cannot be used."""
    try:
        return probe_file(path) if path else "path is empty"
    except ClipError as error:
        return str(error)


def _completed(
    columns: pa.Table, paths: Sequence[str], kept: np.ndarray, infos: Sequence[ClipInfo], typed: bool
) -> pa.Table:
    """The kept rows: path, text, what was probed, clip_id, then the other columns in their order.

    `paths`: those of all rows, as they are to be written.
    """
    height = np.array([info.height for info in infos], dtype=np.int64)
    width = np.array([info.width for info in infos], dtype=np.int64)
    made = {
        "num_frames": np.array([info.num_frames for info in infos], dtype=np.int64),
        "height": height,
        "width": width,
        "aspect_ratio": height / width,
        "resolution": height * width,
        "fps": pa.array([info.fps for info in infos], type=pa.float64(), from_pandas=True),  # NaN becomes empty
    }
    mask = pa.array(kept)
    given = columns.filter(mask)
    out: dict[str, pa.Array | pa.ChunkedArray | np.ndarray] = {"path": pa.array(paths, type=pa.string()).filter(mask)}
    out["text"] = given["text"] if "text" in given.column_names else pa.array([""] * len(infos), type=pa.string())
    out |= made
    if "clip_id" in given.column_names:
        out["clip_id"] = given["clip_id"]
    else:
        out["clip_id"] = compute_clip_ids(paths)[kept]  # over all rows: a bad file does not change its neighbours' ids
    for name in given.column_names:
        if name not in out:
            out[name] = _numbers_if_all(given[name]) if typed else given[name]
    return pa.table(out)


def _numbers_if_all(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A text column as whole or decimal numbers where every filled cell is one and none has leading zeros."""
    if not pa.types.is_string(column.type):
        return column
    filled = pc.if_else(pc.equal(column, ""), pa.scalar(None, pa.string()), column)
    if filled.null_count == len(filled) or pc.any(pc.match_substring_regex(filled, r"^[+-]?0\d")).as_py():
        return column
    for kind in (pa.int64(), pa.float64()):
        try:
            return pc.cast(filled, kind)
        except pa.ArrowInvalid:
            continue
    return column


def _write_bad(target: Path, bad: Sequence[tuple[int, str, str]]) -> Path | None:
    """Writes the list of bad rows, or removes the one of an earlier probe."""
    path = target.with_name(f"{target.stem}.bad.csv")
    if not bad:
        path.unlink(missing_ok=True)
        return None
    rows, paths, reasons = zip(*bad, strict=True)
    write_columns(pa.table({"row": pa.array(rows), "path": pa.array(paths), "reason": pa.array(reasons)}), path)
    return path


def write_columns(columns: pa.Table, target: Path) -> None:
    """Writes a table in the format of the suffix: under another name first, so it is complete or absent."""
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        _WRITERS[target.suffix.lower()](columns, partial)
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def _write_arrow(columns: pa.Table, path: Path) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, columns.schema) as writer:
        writer.write_table(columns)


_WRITERS: dict[str, Callable[[pa.Table, Path], None]] = {
    ".csv": pyarrow.csv.write_csv,
    ".parquet": pyarrow.parquet.write_table,
    ".arrow": _write_arrow,
}
