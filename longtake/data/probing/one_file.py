"""What a video or a still holds, read from its container; pixels are decoded only where nothing else is exact."""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from typing import Literal

import av
import av.logging
from PIL import Image

from longtake.data.clips.video import ClipError, check_file, is_countable, is_image, open_video, reason_of
from longtake.data.probing.mp4 import read_mp4, turns_on_its_side

_EXIF_ORIENTATION = 0x0112
_PNG_TEXTS = (b"eXIf", b"zTXt", b"tEXt", b"iTXt")

Way = Literal["header", "packets", "frames"]
Container = av.container.InputContainer
Stream = av.video.stream.VideoStream


@dataclass(frozen=True)
class ClipInfo:
    """What a reader of the file will get: sizes are those of the upright picture."""

    num_frames: int  # 1 for a still
    height: int
    width: int
    fps: float  # frames per second rounded to 3 decimals; NaN for stills and where the container does not say
    duration: float  # seconds; NaN where unknown
    codec: str  # "h264", "jpeg" ...


def probe_file(path: str | os.PathLike[str], decode_check: bool = False) -> ClipInfo:
    """Reads what the container says about a video or a still; pixels are decoded only where nothing else is exact.

    The frame count is the header's where the file's index agrees with it; else packets are counted; formats in which
    packets are not frames (AVI, VP8, transport streams ...) are decoded. Raises `ClipError`, also for an MP4 whose
    index reaches beyond the file's end; other damage behind the header is noticed only with `decode_check`, which
    decodes the whole file and compares.
    """
    if is_image(path):
        return _probe_image(os.fspath(path), decode_check)
    info = _probe_by_index(path) or _probe_by_ffmpeg(path)
    if decode_check:
        _check_decodes(path, info)
    return info


def count_frames(path: str | os.PathLike[str], way: Way) -> int | None:
    """The frames of a video counted in one way only; None where that way cannot be trusted with this file.

    "header" asks the container's index, "packets" reads the file without decoding, "frames" decodes all of it.
    Raises `ClipError`.
    """
    if way == "header" and (info := _probe_by_index(path)):
        return info.num_frames
    with open_video(path) as (container, stream):
        if way == "frames":
            return _count_by_decoding(container, stream)[0]
        if not _has_packets_for_frames(container, stream):
            return None
        return _count_by_header(path, container, stream) if way == "header" else _count_packets(container, stream)


def _probe_by_index(path: str | os.PathLike[str]) -> ClipInfo | None:
    """A plain MP4 or MOV by its index; None for everything else. Raises `ClipError` where there is no file."""
    name = os.fspath(path)
    check_file(name)
    try:
        video = read_mp4(name)
    except OSError as error:
        raise ClipError(f"cannot be read: {error.strerror or error}") from error
    if video is None:
        return None
    height, width = (video.width, video.height) if video.on_its_side else (video.height, video.width)
    return ClipInfo(video.num_frames, height, width, round(float(video.fps), 3), video.duration, video.codec)


def _probe_by_ffmpeg(path: str | os.PathLike[str]) -> ClipInfo:
    with open_video(path) as (container, stream):
        count, rotated = _count(path, container, stream)
        if count < 1:
            raise ClipError("no video frames")
        height, width = stream.codec_context.height, stream.codec_context.width
        if min(height, width) < 1:
            raise ClipError("the frame size is unknown")
        rate = stream.average_rate or stream.guessed_rate
        if _is_gif(stream) and stream.duration:  # delays of 4, 4 and 5/100 s are said to be 25 a second
            rate = count / (stream.duration * stream.time_base)
        fps = round(float(rate), 3) if rate else math.nan
        if stream.duration and stream.time_base:
            duration = float(stream.duration * stream.time_base)
        else:
            duration = count / fps if fps > 0 else math.nan
        if rotated:
            height, width = width, height
        return ClipInfo(count, height, width, fps, duration, _codec(stream))


def _probe_image(path: str, decode_check: bool) -> ClipInfo:
    check_file(path)
    try:
        with Image.open(path) as image:
            width, height = image.size
            if decode_check:
                image.load()
            if _may_have_exif(image, path) and image.getexif().get(_EXIF_ORIENTATION, 1) >= 5:  # on its side
                height, width = width, height
            return ClipInfo(1, height, width, math.nan, math.nan, (image.format or "").lower())
    except Exception as error:  # Pillow lets any kind through on damaged files
        raise ClipError(f"cannot be read: {reason_of(error)}") from error


def _may_have_exif(image: Image.Image, path: str) -> bool:
    """False where asking a PNG for its EXIF would decode all of it, to find none behind the pixels."""
    if image.format != "PNG" or "exif" in image.info or "Raw profile type exif" in image.info:
        return True
    with open(path, "rb") as file:
        file.seek(8)
        behind_pixels = False
        while len(header := file.read(8)) == 8:
            length, kind = struct.unpack(">I4s", header)
            behind_pixels = behind_pixels or kind == b"IDAT"
            if behind_pixels and kind in _PNG_TEXTS:
                return True
            file.seek(length + 4, os.SEEK_CUR)
    return False


def _check_decodes(path: str | os.PathLike[str], info: ClipInfo) -> None:
    """Decodes every frame. Raises `ClipError` where one is damaged or they are not as many as the container says.

    FFmpeg steps over much damage in silence, so what it says of the container's is listened to, and H.265, whose
    decoder marks no frame as damaged, is told to be strict.
    """
    level, count = av.logging.get_level(), 0
    av.logging.set_level(av.logging.ERROR)
    try:
        with av.logging.Capture(local=True) as said, open_video(path) as (container, stream):
            if _codec(stream) == "hevc":
                stream.codec_context.options = {"err_detect": "explode"}
            for frame in container.decode(stream):
                if frame.is_corrupt:
                    raise ClipError(f"frame {count} is damaged")
                count += 1
            complaint = next((text for _, who, text in said if who == container.format.name), "")
    finally:
        av.logging.set_level(level)
    if complaint:
        raise ClipError(f"its container is damaged: {complaint.strip()}")
    if count != info.num_frames:
        raise ClipError(f"{count} frames can be decoded, but its container says {info.num_frames}")


def _count(path: str | os.PathLike[str], container: Container, stream: Stream) -> tuple[int, bool]:
    """The number of frames, and whether they are shown on their side."""
    if not _has_packets_for_frames(container, stream):
        return _count_by_decoding(container, stream)
    if "mp4" in container.format.name:
        rotated = turns_on_its_side(os.fspath(path), stream.id)
        count = _count_by_header(path, container, stream)
        return _count_packets(container, stream) if count is None else count, rotated
    first = None  # Matroska keeps a rotation that PyAV shows only on a decoded frame
    count = 0
    for packet in container.demux(stream):
        if first is None:
            first = next(iter(packet.decode()), None)
        count += _is_frame(packet)
    return count, first is not None and _is_quarter_turn(first)


def _count_by_header(path: str | os.PathLike[str], container: Container, stream: Stream) -> int | None:
    """The header's count where the index of an MP4 agrees with it; `ClipError` where it reaches beyond the file."""
    if "mp4" not in container.format.name:
        return None
    index = stream.index_entries
    if len(index) and index[-1].pos + index[-1].size > os.path.getsize(path):
        raise ClipError("cut short: its index reaches beyond the end of the file")
    return stream.frames if len(index) == stream.frames > 0 and not index[0].is_discard else None


def _count_packets(container: Container, stream: Stream) -> int:
    return sum(_is_frame(packet) for packet in container.demux(stream))


def _count_by_decoding(container: Container, stream: Stream) -> tuple[int, bool]:
    count, rotated = 0, False
    for frame in container.decode(stream):
        rotated = rotated or (count == 0 and _is_quarter_turn(frame))
        count += 1
    return count, rotated


def _has_packets_for_frames(container: Container, stream: Stream) -> bool:
    if _is_gif(stream) or is_countable(container, stream):
        return True
    # A packet of AV1 is a temporal unit, which has exactly one shown frame; its decoder goes by the name libdav1d.
    return _codec(stream) == "av1" and ("mp4" in container.format.name or "matroska" in container.format.name)


def _codec(stream: Stream) -> str:
    return stream.codec_context.codec.canonical_name


def _is_frame(packet: av.Packet) -> bool:
    return packet.size > 0 and not packet.is_discard


def _is_gif(stream: Stream) -> bool:
    return stream.codec_context.name == "gif"


def _is_quarter_turn(frame: av.VideoFrame) -> bool:
    return round(frame.rotation / 90) % 2 == 1
