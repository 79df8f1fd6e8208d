"""Pixels in and out of files: the frames of a clip, a still, and the videos and pictures a run writes.

Everything is uint8 RGB. Video goes through PyAV (FFmpeg), pictures through Pillow. Reading is a pure function of the
file and the frame numbers; every reason why a file cannot be read comes out as `ClipError`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, islice
from pathlib import Path

import av
import numpy as np
from av.video.reformatter import VideoReformatter
from PIL import Image

from longtake.data.clips.animation import animation_frames, count_frames
from longtake.data.clips.display import Container, Display, Stream, select_stream
from longtake.data.clips.formats import IMAGE_SUFFIXES, suffix_of
from longtake.durable import unfinished

Decoded = tuple[list[int], np.ndarray]  # places, and the pixels of one frame

# Demuxers that make "video" of text and play lists: a caption file by the name of x.txt decodes as ANSI art.
_NOT_VIDEO = frozenset({"tty", "hls", "concat", "concatf", "dash", "lrc", "srt", "ass"})

# Where one packet is one shown frame and timestamps can be trusted, packets may be counted in place of frames.
# Elsewhere (AVI's packed B-frames, VP8's hidden frames, transport streams) frames are counted by decoding.
_COUNTED_FORMATS = ("mp4", "matroska")
_COUNTED_CODECS = frozenset({"h264", "hevc", "vp9", "av1", "mpeg4", "mjpeg", "prores", "ffv1"})
# These decoders leave out frames at a file's start that are shown before its first key frame but come after it, as
# lossless cutting leaves them.
_DROPS_LEADING = frozenset({"hevc", "mpeg4"})

_BT709 = 1  # the code of BT.709 for matrix, primaries and transfer in H.273
_LIMITED_RANGE = 1
_PARALLEL_PIXELS = 1 << 20  # below this frame size libx264's threads cost more than they bring


class ClipError(ValueError):
    """A file that cannot be used as a clip. Its text is the reason, without the path, which stands beside it."""


class _NotCountable(Exception):
    """The shortcut of `_packets_near` does not hold for this file; frames must be counted from the start."""


def is_image(path: str | os.PathLike[str]) -> bool:
    """Return True where `path` is a picture by its suffix, animated (`animation.is_still`) or not. GIFs are read as
    video."""
    return suffix_of(path) in IMAGE_SUFFIXES


@contextmanager
def open_video(path: str | os.PathLike[str]) -> Iterator[tuple[Container, Stream]]:
    """Yield the opened container and the video stream that players choose (`select_stream`); closed at the end.

    Raises `ClipError` when there is no such file or stream or its codec is unknown. What fails in the body of the
    `with` is the file's fault too, whatever PyAV makes of it (damaged files give it any kind of exception).
    """
    name = os.fspath(path)
    check_file(name)
    try:
        # "file:" keeps FFmpeg from reading "a:b.mp4" as a protocol and from ever reaching for the network.
        with av.open(f"file:{name}", metadata_errors="replace") as container:
            if container.format.name in _NOT_VIDEO:
                raise ClipError(f"not a video file (FFmpeg takes it for {container.format.name})")
            stream = select_stream(container, f"file:{name}")
            if stream is None:
                raise ClipError("no video stream")
            if stream.codec_context is None:
                raise ClipError("the video's codec is unknown to FFmpeg")
            stream.codec_context.thread_count = 1  # loaders run one process a core; frame order is then certain too
            yield container, stream
    except (ClipError, _NotCountable):
        raise
    except Exception as error:
        if os.fspath(path).lower().endswith(".txt"):  # camera poses, where a control video is wanted
            raise ClipError("is text, not a video or a picture") from error
        raise ClipError(f"cannot be decoded: {reason_of(error)}") from error


def countable_packets(container: Container, stream: Stream) -> Iterator[av.Packet] | None:
    """All packets of the stream where each is one shown frame, by its format, codec and start; else None.

    To be asked before anything is read. After None, what was read is lost: decoding needs the file opened anew.
    """
    codec = stream.codec_context.codec.canonical_name  # of AV1, the decoder's own name is another
    if codec not in _COUNTED_CODECS or not any(name in container.format.name for name in _COUNTED_FORMATS):
        return None
    packets = container.demux(stream)
    head = list(islice(packets, 2))  # the last one may be the end mark, of size 0
    first, second = head[0], head[-1]
    if not first.is_keyframe:  # decoders leave out what they cannot begin with, each in its own way
        return None
    if codec in _DROPS_LEADING:
        if first.pts is None:
            return None
        if second is not first and second.size and (second.pts is None or second.pts <= first.pts):
            return None
    return chain(head, packets)


def check_file(path: str) -> None:
    """Raise `ClipError` unless `path` is a file with something in it."""
    try:
        size = os.stat(path).st_size if os.path.isfile(path) else None
    except OSError as error:
        raise ClipError(f"cannot be read: {reason_of(error)}") from error
    except ValueError as error:  # a null byte in the name
        raise ClipError(f"not a file name: {error}") from error
    if size is None:
        kind = "a folder" if os.path.isdir(path) else "a pipe or device" if os.path.exists(path) else ""
        raise ClipError(f"is {kind}, not a file" if kind else "no such file")
    if size == 0:
        raise ClipError("the file is empty")


_EXPECTED = (av.FFmpegError, OSError, SyntaxError, ValueError, Image.DecompressionBombError)


def reason_of(error: Exception) -> str:
    """What a decoder's exception says, on one line; kinds it does not raise on purpose are named before it."""
    if isinstance(error, Image.UnidentifiedImageError):
        return "not a picture of a known format"
    text = " ".join(str(getattr(error, "strerror", None) or error).split()).rstrip(".")
    kind = type(error).__name__
    if not text:
        return kind
    return text if isinstance(error, _EXPECTED) else f"{kind}: {text}"


def read_frames(path: str | os.PathLike[str], indices: Sequence[int] | np.ndarray | None = None) -> np.ndarray:
    """Frames of a video: uint8 [T, H, W, 3] RGB, in the order of `indices` (None: all); raises as `decode_frames`."""
    if indices is None:
        return np.stack([pixels for _, pixels in decode_frames(path)])
    frames = [np.empty(0)] * len(indices)
    for places, pixels in decode_frames(path, indices):
        for place in places:
            frames[place] = pixels
    return np.stack(frames)


def decode_frames(path: str | os.PathLike[str], indices: Sequence[int] | np.ndarray | None = None) -> Iterator[Decoded]:
    """Frames of a video one after the other, as they are decoded: `(places, pixels)`.

    `pixels`: uint8 [H, W, 3] RGB as a player shows it (`Display`); `places`: where in `indices` this frame stands. Only
    the frame at hand is alive, so a reader that reduces it at once never holds a clip at source size.

    `indices`: frame numbers in showing order, counted from 0, any order, repeats allowed; None reads all. The numbers
    mean what a full decode would count, also where frames are unevenly spaced in time. In MP4, MOV, MKV and WebM only
    the stretch from the key frame before the first wanted frame is decoded; MP4 and MOV also skip reading what lies
    before, by their index. Frames that change size on the way are scaled to the size the container states. Pictures are
    read by Pillow.

    Raises `ClipError` when the file cannot be decoded or has fewer frames than asked for.
    """
    if indices is None:
        yield from _pictures(path, None) if is_image(path) else _decode(path, None, near=False)
        return
    wanted = np.asarray(indices, dtype=np.int64)
    if wanted.ndim != 1 or not len(wanted) or wanted.min() < 0:
        raise ValueError(f"indices = {indices}: expected one or more frame numbers from 0")
    if is_image(path):
        yield from _pictures(path, wanted)
        return
    if wanted.min() > 0:
        try:
            yield from _decode(path, wanted, near=True)
            return
        except _NotCountable:  # rare, and found out before the first frame: counted from the start instead
            pass
    yield from _decode(path, wanted, near=False)


def _decode(path: str | os.PathLike[str], wanted: np.ndarray | None, near: bool) -> Iterator[Decoded]:
    """Yield the wanted frames (None: all); `near` starts at the key frame before the first."""
    places = _places_of(wanted)
    last = max(places, default=None)
    count = 0
    with open_video(path) as (container, stream):
        display = Display(stream)
        if near:
            numbered = _frames_near(container, stream, display, min(places))
        else:
            numbered = enumerate(display.decode(container.demux(stream)))
        for number, frame in numbered:
            count = number + 1
            if wanted is not None and number not in places:
                continue
            yield places.get(number, [number]), display.picture(frame)
            if number == last:
                break
        if count == 0:
            raise ClipError("no frame can be decoded")
        if last is not None and count <= last:
            raise ClipError(f"frame {last} was asked for, but the file ends after {count} frames")


def _places_of(wanted: np.ndarray | None) -> dict[int, list[int]]:
    """Return the places of each wanted frame, by its number."""
    places: dict[int, list[int]] = {}
    for place, number in enumerate(() if wanted is None else wanted.tolist()):
        places.setdefault(number, []).append(place)
    return places


def _pictures(path: str | os.PathLike[str], wanted: np.ndarray | None) -> Iterator[Decoded]:
    """`_decode` for a picture, animated or not."""
    places = _places_of(wanted)
    with open_picture(path) as image:
        count = count_frames(image)
        if places and max(places) >= count:
            raise ClipError(f"frame {max(places)} was asked for, but the file ends after {count} frames")
        for number, pixels in animation_frames(image, None if wanted is None else places):
            yield places.get(number, [number]), pixels


def _frames_near(
    container: Container, stream: Stream, display: Display, first: int
) -> Iterator[tuple[int, av.VideoFrame]]:
    """Numbered frames from the last key frame at or before frame `first` on. Raises `_NotCountable`."""
    whole = countable_packets(container, stream)
    if whole is None:
        raise _NotCountable
    position = _seek_by_index(container, stream, first)
    packets = _packets_near(whole if position is None else container.demux(stream), position or 0, first)
    number, key_pts = next(packets)
    started = number == 0
    for frame in display.decode(packets):
        if not started:
            if frame.pts is None:
                raise _NotCountable
            if frame.pts < key_pts:  # shown before the key frame: belongs to the part that was skipped
                continue
            if frame.pts != key_pts:  # the decoder could not start here
                raise _NotCountable
            started = True
        yield number, frame
        number += 1


def _seek_by_index(container: Container, stream: Stream, first: int) -> int | None:
    """Seeks to a key frame at or before frame `first` by an MP4's index: packets before it; None without index."""
    index = stream.index_entries
    if stream.frames <= 0 or len(index) != stream.frames or index[0].is_discard:
        return None
    key = index.search_timestamp(index[min(first, len(index) - 1)].timestamp, backward=True)
    if key <= 0:
        return None
    container.seek(index[key].timestamp, stream=stream, backward=True)
    packet = next(container.demux(stream), None)  # FFmpeg may have chosen an earlier key frame: look where we are
    if packet is None or packet.dts is None:
        raise _NotCountable
    position = index.search_timestamp(packet.dts, backward=True, any_frame=True)
    if position < 0 or index[position].timestamp != packet.dts:
        raise _NotCountable
    container.seek(index[key].timestamp, stream=stream, backward=True)
    return position


def _packets_near(packets: Iterator[av.Packet], position: int, first: int) -> Iterator:
    """Drop packets before the last usable key frame whose number is at most `first`, without decoding them.

    `position`: how many packets lie before the iterator. Yields first `(frame number, pts)` of the key frame to start
    from, then the packets. A key frame's number is its packet count plus the "leading" frames, which follow it in the
    file but are shown before it (open groups of pictures) and cannot be decoded from here.
    """
    held: list[av.Packet] = []  # from the chosen key frame on
    chosen: tuple[int, int] | None = None  # its number and pts
    pending: _Key | None = None  # a later key frame whose leading frames are being counted
    for packet in packets:
        ended = packet.size == 0  # the demuxer's end mark, which flushes the decoder
        if not ended and (packet.pts is None or packet.is_discard or not (held or packet.is_keyframe)):
            raise _NotCountable
        if pending and not ended and packet.pts < pending.pts:
            pending.number += 1
        else:
            if pending and pending.number <= first:
                del held[: pending.place]
                chosen = pending.number, pending.pts
            if pending and chosen is None:
                raise _NotCountable
            pending = None
            if not ended and packet.is_keyframe and position <= first:
                pending = _Key(len(held), position, packet.pts)
        held.append(packet)
        position += 1
        if ended or (pending is None and position > first):
            break
    if chosen is None:
        raise _NotCountable
    yield chosen
    yield from held
    yield from packets


@dataclass
class _Key:
    """A key frame met on the way."""

    place: int  # among the held packets
    number: int  # of packets before it in the file, and of leading frames met so far
    pts: int


def read_image(path: str | os.PathLike[str]) -> np.ndarray:
    """Return a picture as a clip of one frame: uint8 [1, H, W, 3] RGB as it is shown (`image_picture`).

    Of an animated picture the first frame is taken. Raises `ClipError`.
    """
    with open_picture(path) as image:
        return next(pixels for _, pixels in animation_frames(image, [0]))[None]


@contextmanager
def open_picture(path: str | os.PathLike[str]) -> Iterator[Image.Image]:
    """Yield a picture opened by Pillow. What fails in the body of the `with` is the file's fault too. Raises
    `ClipError`."""
    name = os.fspath(path)
    check_file(name)
    try:
        with Image.open(name) as image:
            yield image
    except ClipError:
        raise
    except Exception as error:  # Pillow lets any kind through on damaged files
        raise ClipError(f"cannot be read: {reason_of(error)}") from error


def write_video(path: str | os.PathLike[str], frames: np.ndarray, fps: float, crf: float = 23) -> None:
    """Write an H.264 file (MP4 by its suffix; MOV and MKV work too), complete or not at all.

    `frames`: uint8 [T, H, W, 3] RGB, T >= 1; `fps`: frames per second; `crf`: x264's quality, from 0 (only the change
    of colour space loses anything) over 18 (hard to tell from the source) to 51. Colours are stored as BT.709 and say
    so. Even sizes use yuv420p, which every player shows; an odd height or width cannot, and uses yuv444p rather than
    padding or cutting a line.
    """
    frames = _check_pixels(frames, 4, "[T, H, W, 3]")
    with video_writer(path, frames.shape[1:3], fps, crf) as add:
        add(frames)


@contextmanager
def video_writer(
    path: str | os.PathLike[str], size: tuple[int, ...], fps: float, crf: float = 23
) -> Iterator[Callable[[np.ndarray], None]]:
    """`write_video` for frames that come in parts: what takes them, of `size` (H, W)."""
    if not fps > 0:
        raise ValueError(f"fps = {fps}: a video needs a frame rate above 0")
    height, width = size
    pixel_format = "yuv420p" if height % 2 == 0 and width % 2 == 0 else "yuv444p"
    target = Path(path)
    with unfinished(target, synced=False) as partial:
        settings = {"movflags": "+faststart"} if target.suffix.lower() in (".mp4", ".mov") else {}
        with av.open(f"file:{partial}", "w", options=settings) as container:
            rate = Fraction(fps).limit_denominator(1001)
            options = {"crf": str(crf), "x264-params": "cpu-independent=1"}  # else the bytes change from run to run
            stream = container.add_stream("libx264", rate=rate, options=options)
            stream.width, stream.height, stream.pix_fmt = width, height, pixel_format
            context = stream.codec_context
            context.thread_count = 1 if height * width < _PARALLEL_PIXELS else 0
            context.colorspace = context.color_primaries = context.color_trc = _BT709
            context.color_range = _LIMITED_RANGE
            reformatter = VideoReformatter()

            def add(frames: np.ndarray) -> None:
                for pixels in _check_pixels(frames, 4, "[T, H, W, 3]"):
                    frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
                    frame = reformatter.reformat(frame, format=pixel_format, dst_colorspace="ITU709", threads=1)
                    frame.colorspace = frame.color_primaries = frame.color_trc = _BT709
                    frame.color_range = _LIMITED_RANGE
                    container.mux(stream.encode(frame))

            yield add
            container.mux(stream.encode())


def write_image(path: str | os.PathLike[str], pixels: np.ndarray) -> None:
    """Write one picture, complete or not at all; the suffix chooses the format. `pixels`: uint8 [H, W, 3] RGB."""
    image = Image.fromarray(_check_pixels(pixels, 3, "[H, W, 3]"))
    with unfinished(Path(path), synced=False) as partial:
        image.save(partial)


def _check_pixels(pixels: np.ndarray, dims: int, shape: str) -> np.ndarray:
    pixels = np.asarray(pixels)
    if pixels.dtype != np.uint8 or pixels.ndim != dims or pixels.shape[-1] != 3 or not pixels.size:
        raise ValueError(f"pixels of shape {list(pixels.shape)} and type {pixels.dtype}: expected uint8 {shape}")
    return pixels
