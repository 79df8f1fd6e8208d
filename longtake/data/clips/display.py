"""The picture a player shows: stream, orientation, pixel aspect, transparency and transfer, for images and videos."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from io import BytesIO

import av
import numpy as np
from av.sidedata.sidedata import Type
from av.video.reformatter import VideoReformatter
from PIL import Image, ImageCms, ImageOps

from longtake.data.clips.tone import BT2020, HDR_TRANSFERS, TO_BT709, narrow_gamut, tone_map

Container = av.container.InputContainer
Stream = av.video.stream.VideoStream

_NOT_SHOWN = (
    av.stream.Disposition.attached_pic | av.stream.Disposition.still_image | av.stream.Disposition.timed_thumbnails
)
_COMPARED_PACKETS = 5  # of one stream, after which a stream with fewer than two is a preview
# FFmpeg's own decoders of these leave out the transparency that WebM keeps beside the picture.
_ALPHA_DECODERS = {"vp8": "libvpx", "vp9": "libvpx-vp9"}
_WIDEST_PIXEL = 10  # players ignore aspects of pixels beyond this and its inverse
_UNSPECIFIED = 2  # H.273's code
_DOLBY_VISION_TAGS = frozenset({"dvh1", "dvhe"})  # of tracks that other decoders cannot show
_NEARLY_SQUARE = Fraction(1, 25)  # sizes that are rounded differently in a file's headers are no aspect


def select_stream(container: Container, name: str) -> Stream | None:
    """Return the video stream that players choose; None without one. Covers and previews of one frame are left out.

    `name`: what `container` was opened from; opened again where several streams must be compared.
    """
    streams = [stream for stream in container.streams.video if not stream.disposition & _NOT_SHOWN]
    if len(streams) > 1:
        counts = _count_first_packets(name)
        streams = [stream for stream in streams if counts[stream.index] > 1] or streams
    best = container.streams.best("video")
    return next((stream for stream in streams if best and stream.index == best.index), next(iter(streams), None))


def _count_first_packets(name: str) -> Counter[int]:
    """Packets of each video stream at a file's start, by the streams' indices."""
    counts: Counter[int] = Counter()
    with av.open(name, metadata_errors="replace") as container:
        for packet in container.demux(video=tuple(range(len(container.streams.video)))):
            counts[packet.stream_index] += packet.size > 0
            if counts[packet.stream_index] >= _COMPARED_PACKETS:
                break
    return counts


@dataclass(frozen=True)
class Orientation:
    """How a stored picture is turned: transposed first, then mirrored."""

    transposed: bool = False  # rows become columns
    reversed_columns: bool = False
    reversed_rows: bool = False

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        """Return a view of `pixels` [H, W, 3], upright."""
        if self.transposed:
            pixels = pixels.swapaxes(0, 1)
        return pixels[:: -1 if self.reversed_rows else 1, :: -1 if self.reversed_columns else 1]


def orientation_of(frame: av.VideoFrame) -> Orientation:
    """By the frame's display matrix; angles are rounded to quarter turns."""
    data = frame.side_data.get(Type.DISPLAYMATRIX)
    if data is None:
        return Orientation()
    # column = a x + c y, row = b x + d y (ISO 14496-12 §6.2.2)
    a, b, _, c, d = np.frombuffer(bytes(data), np.int32)[:5].tolist()
    if abs(a) + abs(d) >= abs(b) + abs(c):
        return Orientation(False, a < 0, d < 0)
    return Orientation(True, c < 0, b < 0)


def shown_size(stream: Stream, frame: av.VideoFrame | None) -> tuple[int, int]:
    """Height and width of the upright picture with square pixels; (0, 0) where unknown. `frame`: the first one."""
    height, width = _square_size(stream, frame)
    turned = frame is not None and orientation_of(frame).transposed
    return (width, height) if turned else (height, width)


def _square_size(stream: Stream, frame: av.VideoFrame | None) -> tuple[int, int]:
    """As stored, the width scaled to square pixels. Raises `ValueError` where only Dolby's decoders know colours."""
    context = stream.codec_context
    if frame is not None and frame.color_trc == _UNSPECIFIED:
        is_dolby_vision = context.codec_tag in _DOLBY_VISION_TAGS or frame.side_data.get(Type.DOVI_METADATA)
        if is_dolby_vision:
            raise ValueError(
                "is Dolby Vision without a base picture (profile 5); convert it, such as ffmpeg -init_hw_device vulkan "
                "-i IN -vf libplacebo=colorspace=bt709:color_primaries=bt709:color_trc=bt709:format=yuv420p OUT"
            )
    height, width = context.height, context.width
    if not (height and width) and frame is not None:  # the container does not say
        height, width = frame.height, frame.width
    aspect = stream.sample_aspect_ratio or Fraction(1)
    if not Fraction(1, _WIDEST_PIXEL) <= aspect <= _WIDEST_PIXEL or abs(aspect - 1) <= _NEARLY_SQUARE:
        aspect = Fraction(1)
    return height, max(round(width * aspect), min(width, 1))


def _name_unknown_kind(kinds: type[Type], code: object) -> Type:
    kind = object.__new__(kinds)
    kind._name_, kind._value_ = f"UNKNOWN_{code}", code
    return kind


# PyAV 18 lacks names for kinds of FFmpeg 8 (MV-HEVC's views, EXIF), and gives none of a frame's side data that has one.
Type._missing_ = classmethod(_name_unknown_kind)  # type: ignore[method-assign, assignment]


class Display:
    """Decodes one stream into the pictures that a player shows: uint8 [H, W, 3], sRGB, upright, on white."""

    def __init__(self, stream: Stream):
        self._stream = stream
        self._decoder = stream.codec_context
        codec = self._decoder.codec.canonical_name
        if codec in _ALPHA_DECODERS and stream.metadata.get("alpha_mode") == "1":
            self._decoder = av.CodecContext.create(_ALPHA_DECODERS[codec], "r")
            self._decoder.thread_count = 1
        self._orientation: Orientation | None = None
        self._size = 0, 0
        self._reformatter = VideoReformatter()

    def decode(self, packets: Iterable[av.Packet]) -> Iterator[av.VideoFrame]:
        """Yield the frames of the stream's packets."""
        for packet in packets:
            if self._decoder is not self._stream.codec_context and self._orientation is None:
                for frame in packet.decode():  # only the file's own decoder knows the container's display matrix
                    self._look_at(frame)
            yield from self._decoder.decode(packet)

    def picture(self, frame: av.VideoFrame) -> np.ndarray:
        """One frame as it is shown. Frames that change size are scaled to the first one's."""
        if self._orientation is None or not all(self._size):
            self._look_at(frame)
        if frame.color_trc in HDR_TRANSFERS:
            pixels = tone_map(self._reformat(frame, "rgb48le"), frame.color_trc, frame.color_primaries)
        elif frame.format.has_palette or any(component.is_alpha for component in frame.format.components):
            pixels = lay_on_white(self._reformat(frame, "rgba"))
        else:
            pixels = self._reformat(frame, "rgb24")
            if frame.color_primaries in TO_BT709:
                pixels = narrow_gamut(pixels, frame.color_primaries)
        return self._orientation(pixels)

    def _look_at(self, frame: av.VideoFrame) -> None:
        self._orientation, self._size = orientation_of(frame), _square_size(self._stream, frame)

    def _reformat(self, frame: av.VideoFrame, pixel_format: str) -> np.ndarray:
        # 3.5 times faster than frame.to_ndarray(format="rgb24"), which makes a scaler for every frame
        height, width = self._size
        return self._reformatter.reformat(
            frame, width=width, height=height, format=pixel_format, threads=1
        ).to_ndarray()


def lay_on_white(pixels: np.ndarray) -> np.ndarray:
    """uint8 [H, W, 4] RGBA, not premultiplied -> [H, W, 3], transparent parts white as on a page."""
    alpha = pixels[..., 3:]
    if alpha.min() == 255:
        return np.ascontiguousarray(pixels[..., :3])
    white = 255 * (255 - alpha.astype(np.uint16))
    return ((pixels[..., :3] * alpha.astype(np.uint16) + white + 127) // 255).astype(np.uint8)


def image_picture(image: Image.Image, coding: tuple[int, int] | None = None) -> Image.Image:
    """Return a picture as it is shown: its EXIF orientation and colour profile applied, on white, RGB, HDR
    tone-mapped; 16-bit samples keep their upper eight bits. Raises `ValueError` for floating-point pixels. coding:
    of its file (`coding_of`), where the picture is a later frame."""
    transfer, primaries = coding or coding_of(image)
    image = ImageOps.exif_transpose(image)
    if image.mode == "F":
        raise ValueError("has floating-point pixels; save it with 8 or 16 bits")
    if image.mode == "I" or image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image).clip(0, 65535) >> 8).astype(np.uint8)).convert("RGB")
    if transfer in HDR_TRANSFERS:
        pixels = np.asarray(image.convert("RGB")).astype(np.uint16) * 257
        return Image.fromarray(tone_map(pixels, transfer, primaries))
    image = _in_srgb(image)
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        return Image.fromarray(lay_on_white(np.asarray(image.convert("RGBA"))))
    image = image.convert("RGB")
    has_profile = "icc_profile" in image.info
    is_wide = transfer != _UNSPECIFIED and primaries in TO_BT709 and not has_profile
    return Image.fromarray(narrow_gamut(np.asarray(image), primaries)) if is_wide else image


def _in_srgb(image: Image.Image) -> Image.Image:
    """Return a picture with its colour profile applied; unchanged under sRGB's own and under one that cannot
    be read."""
    if image.mode == "P":
        image = image.convert("RGBA" if "transparency" in image.info else "RGB")
    if image.mode not in ("L", "RGB", "RGBA", "CMYK") or not image.info.get("icc_profile"):
        return image
    try:
        profile = ImageCms.ImageCmsProfile(BytesIO(image.info["icc_profile"]))
        if "srgb" in ImageCms.getProfileDescription(profile).lower():
            return image
        mode = "RGBA" if image.mode == "RGBA" else "RGB"
        shown = ImageCms.profileToProfile(image, profile, ImageCms.createProfile("sRGB"), outputMode=mode)
    except (ImageCms.PyCMSError, OSError, ValueError):
        return image
    return image if shown is None else shown


_HEAD_BYTES = 1 << 16  # in which AVIF and PNG state their colours
_COLOUR_MARKS = {"AVIF": (b"colrnclx", ">u2"), "PNG": (b"cICP", "u1")}  # then primaries and transfer, codes of H.273


def coding_of(image: Image.Image) -> tuple[int, int]:
    """Transfer and primaries by H.273's codes; 2 (unspecified) where the file does not say."""
    mark, kind = _COLOUR_MARKS.get(image.format or "", (b"", "u1"))
    if not mark or image.fp is None:
        return 2, BT2020
    at = image.fp.tell()
    image.fp.seek(0)
    head = image.fp.read(_HEAD_BYTES)
    image.fp.seek(at)
    start = head.find(mark) + len(mark)
    if start < len(mark) or len(head) < start + 4:
        return 2, BT2020
    primaries, transfer = np.frombuffer(head, kind, 2, start).tolist()
    return transfer, primaries
