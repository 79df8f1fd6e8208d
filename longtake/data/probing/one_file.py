"""What a video or a still holds, read from its container; pixels are decoded only where nothing else is exact."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import av
import av.logging
import numpy as np
from PIL import Image

from longtake.data.clips.animation import animation_frames, count_frames, frame_seconds
from longtake.data.clips.display import shown_size
from longtake.data.clips.video import (
    ClipError,
    Container,
    Stream,
    check_file,
    countable_packets,
    is_image,
    open_picture,
    open_video,
)
from longtake.data.probing.mp4 import FrameTimes, is_even, is_uneven, length_of, mean_rate, read_mp4

_ROUNDED_SECONDS = 1e-3  # containers round time stamps to milliseconds
_EXIF_ORIENTATION = 0x0112
_ON_ITS_SIDE = (5, 6, 7, 8)  # orientations that are a quarter turn; readers ignore numbers beyond these
_PNG_TEXTS = (b"eXIf", b"zTXt", b"tEXt", b"iTXt")


@dataclass(frozen=True)
class ClipInfo:
    """What a reader of the file will get: sizes are those of the upright picture."""

    num_frames: int  # 1 for a still
    height: int
    width: int
    fps: float  # frames per second rounded to 3 decimals; NaN for stills and where the container does not say
    duration: float  # seconds; NaN where unknown
    codec: str  # "h264", "jpeg" ...
    uneven_times: bool = False  # some frame is shown half a step or more away from its place at a steady rate


def probe_file(path: str | os.PathLike[str], decode_check: bool = False) -> ClipInfo:
    """Read what the container says about a video or a still; pixels are decoded only where nothing else is exact.

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


def frames_at(path: str | os.PathLike[str], seconds: np.ndarray) -> np.ndarray:
    """Return the frames that a player shows at these times from the first: int64 [N], by the time stamps of a video.

    To be asked for videos of `uneven_times` alone: all packets are read. Raises `ClipError`.
    """
    if is_image(path):
        with open_picture(path) as image:
            times = _shown_at(frame_seconds(image))
        return np.maximum(np.searchsorted(times, seconds + _ROUNDED_SECONDS, side="right") - 1, 0)
    video = read_mp4(os.fspath(path))
    if video is not None:
        times = video.times
    else:
        with open_video(path) as (container, stream):
            seen = _look_through(path, container, stream)
            times = None if seen is None else seen.seconds(stream)
        if times is None:
            with open_video(path) as (container, stream):
                times = _decode_through(container, stream).seconds(stream)
    return np.maximum(np.searchsorted(times, seconds + _ROUNDED_SECONDS, side="right") - 1, 0)


def _probe_by_index(path: str | os.PathLike[str]) -> ClipInfo | None:
    """Return a plain MP4 or MOV by its index; None for everything else. Raises `ClipError` where there is no file."""
    name = os.fspath(path)
    check_file(name)
    try:
        video = read_mp4(name)
    except OSError as error:
        raise ClipError(f"cannot be read: {error.strerror or error}") from error
    if video is None:
        return None
    height, width = (video.width, video.height) if video.on_its_side else (video.height, video.width)
    return ClipInfo(
        video.num_frames, height, width, round(float(video.fps), 3), video.duration, video.codec, is_uneven(video.times)
    )


def _probe_by_ffmpeg(path: str | os.PathLike[str]) -> ClipInfo:
    with open_video(path) as (container, stream):
        seen = _look_through(path, container, stream)
        if seen is not None:
            return _info(container, stream, seen)
    with open_video(path) as (container, stream):  # anew: what was read of it is lost
        return _info(container, stream, _decode_through(container, stream))


@dataclass
class _Scanned:
    """What a file holds behind its header."""

    times: FrameTimes
    first: av.VideoFrame | None = None  # decoded, to know how it is shown
    by_header: bool = False  # the times are not known, and need not be: they are evenly spaced

    def seconds(self, stream: Stream) -> np.ndarray:
        """When each frame is shown, from the first, in showing order: float64 [N]; empty where unknown."""
        times = self.times.shown if self.times.known else []
        return (np.sort(np.array(times, np.int64)) - min(times, default=0)) * float(stream.time_base or 0)


def _info(container: Container, stream: Stream, seen: _Scanned) -> ClipInfo:
    count = seen.times.count
    if count < 1:
        raise ClipError("no frame can be decoded")
    height, width = shown_size(stream, seen.first)
    if min(height, width) < 1:
        raise ClipError("the frame size is unknown")
    fps, duration = _pace(stream, seen)
    return ClipInfo(
        count, height, width, fps, duration, stream.codec_context.codec.canonical_name, is_uneven(seen.seconds(stream))
    )


def _pace(stream: Stream, seen: _Scanned) -> tuple[float, float]:
    """Frames a second, and seconds; NaN where unknown."""
    tick, times = stream.time_base, seen.times
    said, length = stream.average_rate, stream.duration * tick if stream.duration and tick else None
    if _is_gif(stream) and length:  # delays of 4, 4 and 5/100 s are said to be 25 a second
        rate = times.count / length
        steps, span = times.count - 1, (times.last - times.first) * tick
        if steps > 0 and length - span > 2 * span / steps > 0:  # the last picture is held before the first comes again
            rate = steps / span
        return round(float(rate), 3), float(length)
    if seen.by_header or not tick:
        rate = said or stream.guessed_rate or Fraction(0)
        fps = round(float(rate), 3) if rate else math.nan
        return fps, float(length) if length else times.count / fps
    rate = mean_rate(times, tick, said, stream.guessed_rate)
    fps = round(float(rate), 3) if rate else math.nan
    duration = length_of(times, tick, rate, length)
    if not length and rate == said and times.known:
        return fps, times.count / fps
    return fps, float(duration) if duration else math.nan


def _probe_image(path: str, decode_check: bool) -> ClipInfo:
    with open_picture(path) as image:
        width, height = image.size
        count = count_frames(image)
        on_its_side = _may_have_exif(image, path) and image.getexif().get(_EXIF_ORIENTATION) in _ON_ITS_SIDE
        if on_its_side and image.format != "TIFF":  # of which Pillow tells the upright size
            height, width = width, height
        codec = (image.format or "").lower()
        if decode_check:
            for _ in animation_frames(image, ()):
                pass
        if count == 1:
            return ClipInfo(1, height, width, math.nan, math.nan, codec)
        lengths = frame_seconds(image)
        return ClipInfo(
            count, height, width, _steady_rate(lengths), float(lengths.sum()), codec, is_uneven(_shown_at(lengths))
        )


def _shown_at(lengths: np.ndarray) -> np.ndarray:
    """When each frame of an animation is shown, by how long each one is: float64 [N]."""
    return np.cumsum(lengths) - lengths


def _steady_rate(lengths: np.ndarray) -> float:
    """Frames a second; the last picture may be held before the first comes again, as in `_pace`."""
    span, steps = float(lengths[:-1].sum()), len(lengths) - 1
    is_held = lengths[-1] > 2 * span / steps
    return round(steps / span if is_held else len(lengths) / float(lengths.sum()), 3)


def _may_have_exif(image: Image.Image, path: str) -> bool:
    """Return False where asking a PNG for its EXIF would decode all of it, to find none behind the pixels."""
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
    """Decode every frame. Raises `ClipError` where one is damaged or they are not as many as the container says.

    FFmpeg steps over much damage in silence, so what it says of the container's is listened to, and H.265, whose
    decoder marks no frame as damaged, is set to be strict.
    """
    level, skipping, count = av.logging.get_level(), av.logging.get_skip_repeated(), 0
    av.logging.set_level(av.logging.ERROR)
    av.logging.set_skip_repeated(False)  # else a complaint that the file before it gave rise to would be left out
    try:
        with av.logging.Capture(local=True) as said, open_video(path) as (container, stream):
            if stream.codec_context.codec.canonical_name == "hevc":
                stream.codec_context.options = {"err_detect": "explode"}
            for frame in container.decode(stream):
                if frame.is_corrupt:
                    raise ClipError(f"frame {count} is damaged")
                count += 1
            complaint = next((text for _, who, text in said if who == container.format.name), "")
    finally:
        av.logging.set_level(level)
        av.logging.set_skip_repeated(skipping)
    if complaint:
        raise ClipError(f"its container is damaged: {complaint.strip()}")
    if count != info.num_frames:
        raise ClipError(f"{count} frames can be decoded, but its container says {info.num_frames}")


def _look_through(path: str | os.PathLike[str], container: Container, stream: Stream) -> _Scanned | None:
    """What the header and the packets tell; None where only decoding tells more."""
    packets = _packets(container, stream)
    if packets is None:
        return None
    count = _count_by_header(path, container, stream)
    by_header = count is not None and is_even(np.array([entry.timestamp for entry in stream.index_entries]))
    seen = _Scanned(FrameTimes(count, known=False) if by_header else FrameTimes(), by_header=by_header)
    for packet in packets:
        if seen.first is None:
            seen.first = next(iter(packet.decode()), None)
        if by_header and seen.first is not None:
            break
        if not by_header and _is_frame(packet):
            seen.times.add(packet.pts, packet.duration)
    return seen


def _count_by_header(path: str | os.PathLike[str], container: Container, stream: Stream) -> int | None:
    """Return the header's count where the index of an MP4 agrees with it; `ClipError` where it reaches beyond
    the file."""
    if "mp4" not in container.format.name:
        return None
    index = stream.index_entries
    if len(index) and index[-1].pos + index[-1].size > os.path.getsize(path):
        raise ClipError("cut short: its index reaches beyond the end of the file")
    return stream.frames if len(index) == stream.frames > 0 and not index[0].is_discard else None


def _decode_through(container: Container, stream: Stream) -> _Scanned:
    seen, before = _Scanned(FrameTimes()), None
    for frame in container.decode(stream):
        if seen.times.count == 0:
            seen.first = frame
        seen.times.add(frame.pts, frame.duration)
        if before is not None and frame.pts is not None and frame.pts <= before:  # the clock was set back
            seen.times.known = False
        before = frame.pts
    return seen


def _packets(container: Container, stream: Stream) -> Iterator[av.Packet] | None:
    """All packets where each is one frame; None where the file must be opened anew, and decoded."""
    return container.demux(stream) if _is_gif(stream) else countable_packets(container, stream)


def _is_frame(packet: av.Packet) -> bool:
    return packet.size > 0 and not packet.is_discard


def _is_gif(stream: Stream) -> bool:
    return stream.codec_context.name == "gif"
