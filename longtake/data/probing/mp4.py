"""What an MP4 or MOV file holds, from its index alone (ISO 14496-12), for the plain files that most clips are; and how
fast and how long a video is by its frames' times, where the container's word does not agree with them.

FFmpeg's opening of a 720p H.264 file takes 6 to 10 ms, most of it spent decoding a first frame to learn what the
header says already. Reading the header takes a few tenths of a millisecond. Only what is beyond doubt is answered
here: one video track of H.264 or H.265, samples all inside the file, no fragments, no edit list that hides a frame.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import BinaryIO

import numpy as np

from longtake.data.probing.sps import read_avcc, read_hvcc

_FIRST_BOXES = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")
_LARGEST_INDEX = 256 << 20  # bytes; a day of video at 60 frames a second has 100 MB
_CODECS = {b"avc1": ("h264", b"avcC", read_avcc), b"hvc1": ("hevc", b"hvcC", read_hvcc)}
_CODECS[b"hev1"] = _CODECS[b"hvc1"]
_ENTRY_SIZE = 86  # bytes of a visual sample entry, its header included, before its own boxes

_TOLERANCE = 0.01  # of the length: containers round rates and times, and their rates are then the better numbers
_TICKS = 2  # and this many ticks: both ends are rounded

Span = tuple[int, int]  # where the contents of a box begin and end


@dataclass(frozen=True)
class Mp4Video:
    """The video track of a plain file. Height and width are as stored, before the rotation."""

    num_frames: int
    height: int
    width: int
    fps: Fraction
    duration: float  # seconds
    codec: str
    on_its_side: bool  # shown a quarter turn from how it is stored
    times: np.ndarray  # seconds at which frames are shown, from the first, in showing order


def read_mp4(path: str) -> Mp4Video | None:
    """Return the file's video by its index, or None where a more careful reader must look. Raises `OSError`."""
    with open(path, "rb") as file:
        try:
            moov = _read_moov(file)
            return None if moov is None else _read_video(moov, os.fstat(file.fileno()).st_size)
        except (struct.error, LookupError, ValueError, ArithmeticError):  # boxes lack, or are damaged: FFmpeg says how
            return None


def _read_moov(file: BinaryIO) -> bytes | None:
    """Return the contents of the index box; None for a file with fragments, of another kind, or without."""
    size = os.fstat(file.fileno()).st_size
    at, moov = 0, None
    while at + 8 <= size:
        file.seek(at)
        kind, skip, length = _header(file.read(16), 0, size - at)
        if kind == b"moof" or (at == 0 and kind not in _FIRST_BOXES):
            return None
        if kind == b"moov":
            if moov is not None or length > _LARGEST_INDEX:
                return None
            file.seek(at + skip)
            moov = file.read(length - skip)
        at += length
    return moov if at >= size else None


def _boxes(data: bytes, span: Span) -> Iterator[tuple[bytes, Span]]:
    """Kind and contents of every box between two places."""
    at, end = span
    while at + 8 <= end:
        kind, skip, length = _header(data, at, end - at)
        yield kind, (at + skip, at + length)
        at += length


def _header(data: bytes, at: int, room: int) -> tuple[bytes, int, int]:
    """Kind of the box at a place, bytes of its header, and of all of it; `room`: bytes up to the end of its parent."""
    length, kind = struct.unpack_from(">I4s", data, at)
    skip = 8
    if length == 1:
        length, skip = struct.unpack_from(">Q", data, at + 8)[0], 16
    elif length == 0:
        length = room
    if not skip <= length <= room:
        raise ValueError("a box reaches beyond the one it lies in")
    return kind, skip, length


def _all(data: bytes, kind: bytes, span: Span) -> list[Span]:
    return [inner for name, inner in _boxes(data, span) if name == kind]


def _read_video(moov: bytes, file_size: int) -> Mp4Video | None:
    """Return the one video track; None where there is none, or several, or anything unusual about it."""
    everything = list(_boxes(moov, (0, len(moov))))
    headers = [span for kind, span in everything if kind == b"mvhd"]
    if len(headers) != 1 or any(kind in (b"mvex", b"cmov") for kind, _ in everything):
        return None
    videos = []
    for kind, span in everything:
        if kind == b"trak":
            track = dict(_boxes(moov, span))
            media = dict(_boxes(moov, track[b"mdia"]))
            if moov[media[b"hdlr"][0] + 8 : media[b"hdlr"][0] + 12] == b"vide":
                videos.append(track | media)
    if len(videos) != 1:
        return None
    boxes = videos[0]
    samples = dict(_boxes(moov, dict(_boxes(moov, boxes[b"minf"]))[b"stbl"]))
    described, sizes = _read_description(moov, samples[b"stsd"]), _read_sizes(moov, samples[b"stsz"])
    times = _read_times(moov, samples, len(sizes))
    if described is None or times is None or not _lies_inside(moov, samples, sizes, file_size):
        return None
    codec, height, width = described
    scale, length = _read_scale(moov, boxes[b"mdhd"])
    movie_scale, _ = _read_scale(moov, headers[0])
    shown, decoded, total = times
    if not 1 <= scale < 1 << 31 or (codec == "hevc" and len(shown) > 1 and shown[1] <= shown[0]):
        return None  # H.265 decoders leave out frames before the first key frame that come after it in the file
    turned = _is_quarter_turn(moov, boxes[b"tkhd"], headers[0])
    if (
        turned is None
        or not _has_square_pixels(moov, boxes[b"tkhd"], samples[b"stsd"], height, width)
        or (b"edts" in boxes and not _shows_all(moov, boxes[b"edts"], shown, scale, movie_scale))
    ):
        return None
    length = min(total, length) if length > 0 else total
    rate, duration = Fraction(scale * len(shown), total), Fraction(length, scale)
    if not is_even(decoded):
        last = int(np.flatnonzero(shown == shown.max())[-1])
        end = int(decoded[last + 1]) if last + 1 < len(shown) else total
        shows = FrameTimes(len(shown), int(shown.min()), int(shown.max()), end - int(decoded[last]))
        rate = mean_rate(shows, Fraction(1, scale), rate)
        duration = length_of(shows, Fraction(1, scale), rate, duration)
    return Mp4Video(
        len(shown), height, width, rate, float(duration), codec, turned, (np.sort(shown) - shown.min()) / scale
    )


def is_even(times: np.ndarray) -> bool:
    """Whether frames come to be decoded at equal steps, by the times int64 [N] at which they do."""
    return len(times) < 3 or bool((np.diff(times) == times[1] - times[0]).all())


def is_uneven(times: np.ndarray) -> bool:
    """Return True if a frame is shown half a step or more away from its place at the mean rate; times: seconds [N]."""
    if len(times) < 3 or times[-1] <= 0:
        return False
    steady = np.linspace(0, times[-1], len(times))
    return bool(np.abs(times - steady).max() >= 0.5 * steady[1])


def _is_quarter_turn(data: bytes, track: Span, movie: Span) -> bool | None:
    """By the display matrix of a track header (§8.3.2), then of the movie header (§8.2.2); None for other angles."""
    a, b, c, d = struct.unpack_from(">ii4xii", data, track[0] + (52 if data[track[0]] == 1 else 40))
    e, f, g, h = struct.unpack_from(">ii4xii", data, movie[0] + (48 if data[movie[0]] == 1 else 36))
    upright, turned = (a * e + b * g, c * f + d * h), (a * f + b * h, c * e + d * g)
    if all(upright) and not any(turned):
        return False
    return True if all(turned) and not any(upright) else None


def _has_square_pixels(data: bytes, track: Span, description: Span, height: int, width: int) -> bool:
    """By the pixel aspect (§12.1.4) and the size of the track header (§8.3.2), where they say; else FFmpeg decides."""
    inside = dict(_boxes(data, (description[0] + 8 + _ENTRY_SIZE, description[1])))
    if b"pasp" in inside:
        across, down = struct.unpack_from(">II", data, inside[b"pasp"][0])
        if across != down:
            return False
    matrix = track[0] + (52 if data[track[0]] == 1 else 40)
    a, b, c, d, shown_width, shown_height = struct.unpack_from(">ii4xii16xII", data, matrix)
    if abs(math.hypot(a, c) - math.hypot(b, d)) > _TOLERANCE * math.hypot(a, c):
        return False
    shown_width, shown_height = shown_width >> 16, shown_height >> 16
    return not (shown_width and shown_height) or abs(shown_width * height - shown_height * width) <= max(height, width)


def _read_scale(data: bytes, header: Span) -> tuple[int, int]:
    """Ticks a second and length in ticks, from a movie or media header."""
    if data[header[0]] == 1:
        return struct.unpack_from(">IQ", data, header[0] + 20)
    return struct.unpack_from(">II", data, header[0] + 12)


def _read_description(data: bytes, span: Span) -> tuple[str, int, int] | None:
    """Codec, height and width, where the codec's own header and the container agree on them."""
    if struct.unpack_from(">I", data, span[0] + 4)[0] != 1:
        return None
    codec, name, read = _CODECS[data[span[0] + 12 : span[0] + 16]]
    inside = dict(_boxes(data, (span[0] + 8 + _ENTRY_SIZE, span[1])))
    size = read(data[slice(*inside[name])])
    width, height = struct.unpack_from(">HH", data, span[0] + 40)
    return (codec, *size) if size == (height, width) else None  # two opinions: FFmpeg knows which one decoders follow


def _read_times(data: bytes, samples: dict[bytes, Span], num: int) -> tuple[np.ndarray, np.ndarray, int] | None:
    """When each of `num` frames is shown and decoded (§8.6.1), int64 [N] in the order of the file, and how long all
    take, in ticks; None unless the file starts at a key frame and its tables agree."""
    counts, steps = _table(data, samples[b"stts"], ">u4", 2).astype(np.int64).T
    if num < 1 or int(counts.sum()) != num or steps.min() < 0 or steps.max() >= 1 << 31:
        return None
    decoded = np.concatenate([[0], np.cumsum(np.repeat(steps, counts))])
    shown, total = decoded[:-1], int(decoded[-1])
    if b"ctts" in samples:
        counts, delays = _table(data, samples[b"ctts"], ">i4", 2).astype(np.int64).T
        if counts.min() < 0 or int(counts.sum()) != num:
            return None
        shown = shown + np.repeat(delays, counts)
    # Without a list of key frames all frames should be some, but muxers also leave it out where none is.
    if _table(data, samples[b"stss"], ">u4", 1)[0, 0] != 1:
        return None
    return (shown, decoded[:-1], total) if total > 0 and shown.min() >= 0 else None


def _read_sizes(data: bytes, span: Span) -> np.ndarray:
    """Bytes of each frame (§8.7.3): int64 [N]."""
    equal, count = struct.unpack_from(">II", data, span[0] + 4)
    if equal and count != 1:
        raise ValueError("uncompressed frames; nothing in the file vouches for their number")
    return np.array([equal]) if equal else _table(data, (span[0] + 4, span[1]), ">u4", 1)[:, 0].astype(np.int64)


def _table(data: bytes, span: Span, kind: str, columns: int) -> np.ndarray:
    """Rows of a table of numbers, behind a count: [N, columns]."""
    count = struct.unpack_from(">I", data, span[0] + 4)[0]
    if not 0 < count * columns * np.dtype(kind).itemsize <= span[1] - span[0] - 8:
        raise ValueError("a table is empty or longer than its box")
    return np.frombuffer(data, kind, count * columns, span[0] + 8).reshape(count, columns)


def _lies_inside(data: bytes, samples: dict[bytes, Span], sizes: np.ndarray, file_size: int) -> bool:
    """Whether every frame has bytes and all of them lie in the file (§8.7)."""
    place, kind = (b"stco", ">u4") if b"stco" in samples else (b"co64", ">i8")
    chunks = _table(data, samples[place], kind, 1)[:, 0].astype(np.int64)
    if sizes.min() < 1:
        return False
    first, per_chunk, _ = _table(data, samples[b"stsc"], ">u4", 3).astype(np.int64).T
    runs = np.diff(np.append(first, len(chunks) + 1))
    if first[0] != 1 or runs.min() < 1 or int((runs * per_chunk).sum()) != len(sizes):
        return False
    held = np.repeat(per_chunk, runs)  # frames of each chunk
    ends = np.cumsum(held)
    bytes_before = np.concatenate([[0], np.cumsum(sizes)])
    last = chunks + bytes_before[ends] - bytes_before[ends - held]
    return bool(held.min() > 0 and chunks.min() >= 0 and last.max() <= file_size)


def _shows_all(data: bytes, span: Span, shown: np.ndarray, scale: int, movie_scale: int) -> bool:
    """Whether the edit list (§8.6.6) is one stretch, at normal speed, with every frame in it."""
    lists = _all(data, b"elst", span)
    if len(lists) != 1:
        return not lists
    start = lists[0][0]
    count = struct.unpack_from(">I", data, start + 4)[0]
    kind, size = (">Qqi", 20) if data[start] == 1 else (">Iii", 12)
    if not 1 <= count <= 2:
        return False
    edits = [struct.unpack_from(kind, data, start + 8 + size * number) for number in range(count)]
    if count == 2 and edits.pop(0)[1] != -1:  # a pause before the first frame
        return False
    length, begin, speed = edits[0]
    if begin < 0 or speed != 1 << 16 or movie_scale < 1 or begin > shown.min():
        return False
    return length == 0 or length * scale > (int(shown.max()) - begin) * movie_scale


@dataclass
class FrameTimes:
    """What the times of a video's frames tell, met one by one in any order."""

    count: int = 0
    first: int = 0  # ticks
    last: int = 0
    last_length: int = 0  # ticks that the last frame is shown; 0 where unknown
    known: bool = True  # every frame had a time
    shown: list[int] = field(default_factory=list)  # of each frame, in ticks

    def add(self, time: int | None, length: int | None) -> None:
        """Note when a frame is shown and for how long, in ticks."""
        self.count += 1
        if time is None:
            self.known = False
            return
        self.shown.append(time)
        if self.count == 1 or time < self.first:
            self.first = time
        if self.count == 1 or time >= self.last:
            self.last, self.last_length = time, length or 0


def mean_rate(times: FrameTimes, tick: Fraction, said: Fraction | None, guessed: Fraction | None = None) -> Fraction:
    """Frames a second: as the container has `said` where the times agree, else their mean; 0 where nothing is known.

    `tick`: seconds. A mean is known only as closely as times are rounded: within that, `guessed` is taken, or a whole
    number, or one over 1.001.
    """
    span = times.last - times.first
    if not times.known or times.count < 2 or span <= 0:
        return said or guessed or Fraction(0)
    steps = times.count - 1
    if said and abs(span * tick - steps / said) <= _TOLERANCE * span * tick + _TICKS * tick:
        return said
    mean = steps / (span * tick)
    low, high = steps / ((span + 1) * tick), steps / (max(span - 1, Fraction(1, 2)) * tick)
    whole = Fraction(round(mean))
    for rate in (guessed, whole, whole * 1000 / 1001):
        if rate and low <= rate <= high:
            return rate
    return mean


def length_of(times: FrameTimes, tick: Fraction, rate: Fraction, said: Fraction | None) -> Fraction:
    """Seconds: as the container has `said` where the times agree, else from the first frame to the last one's end.

    `rate`: as `mean_rate` gives it; the last frame is not taken to be shown longer than the mean one. 0 where nothing
    is known.
    """
    step = 1 / rate if rate else Fraction(0)
    if not times.known or times.count < 1:
        return said or times.count * step
    span = (times.last - times.first) * tick
    if times.count > 1 and span <= 0:
        return said or times.count * step
    last = times.last_length * tick
    measured = span + (last if 0 < last < step else step)
    if said and abs(said - measured) <= step + _TOLERANCE * measured + _TICKS * tick:
        return said
    return measured
