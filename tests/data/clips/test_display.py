"""Images and videos as players show them; the expected pictures are made without the code under test."""

from __future__ import annotations

import struct
from fractions import Fraction
from itertools import product
from pathlib import Path

import av
import numpy as np
import pytest
from av.video.reformatter import Colorspace, VideoReformatter
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from longtake.data.clips.video import ClipError, read_frames, read_image
from longtake.data.probing.one_file import probe_file

UNIT = 1 << 16
# display matrix (a, b, c, d) -> the stored picture as it is shown, for all turns and mirrors
MATRICES = {
    (1, 0, 0, 1): lambda x: x,
    (-1, 0, 0, 1): lambda x: x[:, ::-1],
    (1, 0, 0, -1): lambda x: x[::-1],
    (-1, 0, 0, -1): lambda x: x[::-1, ::-1],
    (0, 1, -1, 0): lambda x: np.rot90(x, -1),
    (0, -1, 1, 0): lambda x: np.rot90(x, 1),
    (0, 1, 1, 0): lambda x: x.swapaxes(0, 1),
    (0, -1, -1, 0): lambda x: np.rot90(x, 2).swapaxes(0, 1),
}
COLOURS = np.array([[[220, 30, 30], [30, 220, 30]], [[30, 30, 220], [220, 220, 220]]], np.uint8)
STORED = COLOURS.repeat(32, axis=0).repeat(48, axis=1)  # [64, 96, 3]


def write_clip(
    path: Path,
    pixels: np.ndarray = STORED,
    codec: str = "libx264",
    pix_fmt: str = "yuv420p",
    count: int = 3,
    aspect: Fraction | None = None,
    options: dict[str, str] | None = None,
) -> Path:
    pixel_format = "rgba" if pixels.shape[2] == 4 else "rgb24"
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=12, options=options or {})
        stream.height, stream.width, stream.pix_fmt = *pixels.shape[:2], pix_fmt
        if aspect:
            stream.codec_context.sample_aspect_ratio = aspect
        for _ in range(count):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format=pixel_format)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def corners(picture: np.ndarray) -> list[str]:
    """Names of the colours of the four quarters."""
    height, width = picture.shape[:2]
    quarters = [picture[height * y // 4, width * x // 4].astype(int) for y, x in product((1, 3), repeat=2)]
    return ["RGBW"[int(np.abs(COLOURS.reshape(4, 3) - colour).sum(1).argmin())] for colour in quarters]


def assert_shown(path: Path, expected: np.ndarray) -> None:
    read = read_frames(path, [1])[0]
    info = probe_file(path)
    assert corners(read) == corners(expected)
    assert read.shape == expected.shape
    assert (info.height, info.width) == expected.shape[:2]


@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize("suffix", [".mp4", ".mov"])
def test_display_matrix_of_mp4_is_applied(matrix: tuple[int, int, int, int], suffix: str, tmp_path: Path) -> None:
    path = write_clip(tmp_path / f"clip{suffix}")
    data = bytearray(path.read_bytes())
    at = data.index(b"tkhd") + 4 + 40
    a, b, c, d = (value * UNIT for value in matrix)
    data[at : at + 20] = struct.pack(">5i", a, b, 0, c, d)
    path.write_bytes(data)
    assert_shown(path, MATRICES[matrix](STORED))


@pytest.mark.parametrize("degrees", [0, 90, 180, 270])
@pytest.mark.parametrize("mirrored", [False, True])
def test_display_matrix_of_mkv_is_applied(degrees: int, mirrored: bool, tmp_path: Path) -> None:
    path = tmp_path / "clip.mkv"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=12)
        stream.height, stream.width, stream.pix_fmt = 64, 96, "yuv420p"
        stream.set_display_rotation(degrees, hflip=mirrored)
        for _ in range(3):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(STORED, format="rgb24")))
        container.mux(stream.encode())
    with av.open(str(path)) as container:  # the container may have kept less than was set
        data = next(container.decode(video=0)).side_data.get("DISPLAYMATRIX")
    a, b, _, c, d = (
        (round(value / UNIT) for value in struct.unpack("=5i", bytes(data)[:20])) if data else (1, 0, 0, 0, 1)
    )
    assert data or not (degrees or mirrored)
    assert_shown(path, MATRICES[a, b, c, d](STORED))


@pytest.mark.parametrize("orientation", range(10))
@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp", ".tiff", ".avif"])
def test_exif_orientation_is_applied(orientation: int, suffix: str, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(STORED).save(tmp_path / f"a{suffix}", exif=exif)
    matrix = [(1, 0, 0, 1), (-1, 0, 0, 1), (-1, 0, 0, -1), (1, 0, 0, -1)]
    matrix += [(0, 1, 1, 0), (0, 1, -1, 0), (0, -1, -1, 0), (0, -1, 1, 0)]
    expected = MATRICES[matrix[orientation - 1]](STORED) if 1 <= orientation <= 8 else STORED
    info = probe_file(tmp_path / f"a{suffix}")
    picture = read_image(tmp_path / f"a{suffix}")[0]
    assert corners(picture) == corners(expected)
    assert picture.shape == expected.shape == (info.height, info.width, 3)
    if suffix == ".jpg" and 1 <= orientation <= 8:  # cameras write EXIF into the frames of Motion JPEG too
        (tmp_path / "a.mjpeg").write_bytes((tmp_path / "a.jpg").read_bytes() * 3)
        assert_shown(tmp_path / "a.mjpeg", expected)


@pytest.mark.parametrize("aspect", [Fraction(4, 3), Fraction(1, 2)])
@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.mov", "a.ts"])
def test_pixel_aspect_is_applied(aspect: Fraction, name: str, tmp_path: Path) -> None:
    path = write_clip(tmp_path / name, aspect=aspect)
    width = round(96 * aspect)
    assert_shown(path, STORED[:, np.arange(width) * 96 // width])


def test_pixel_aspect_in_the_h264_header_alone_is_probed(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "a.mp4", aspect=Fraction(4, 3))
    path.write_bytes(path.read_bytes().replace(b"pasp", b"free"))
    info = probe_file(path)
    assert read_frames(path, [0]).shape[1:3] == (info.height, info.width) == (64, 128)


ALPHA = {
    "vp8.webm": ("libvpx", "yuva420p", {"auto-alt-ref": "0"}),
    "vp9.webm": ("libvpx-vp9", "yuva420p", {"auto-alt-ref": "0", "cpu-used": "8"}),
    "ffv1.mkv": ("ffv1", "yuva420p", {}),
    "qtrle.mov": ("qtrle", "argb", {}),
    "a.apng": ("apng", "rgba", {}),
}


@pytest.mark.parametrize("name", [*ALPHA, "a.gif", "a.webp", "a.png"])
def test_transparent_parts_are_white(name: str, tmp_path: Path) -> None:
    pixels = np.zeros((64, 64, 4), np.uint8)
    pixels[..., 0] = 200
    pixels[:32, :, 3] = 255
    path = tmp_path / name
    if name in ALPHA:
        codec, pix_fmt, options = ALPHA[name]
        write_clip(path, pixels, codec, pix_fmt, options=options)
    else:
        first, second = Image.fromarray(pixels), Image.fromarray(pixels[:, ::-1])
        first.save(path, **({"save_all": True, "append_images": [second], "disposal": 2} if name == "a.gif" else {}))
    picture = read_image(path)[0] if path.suffix in (".webp", ".png") else read_frames(path, [0])[0]
    assert np.abs(picture[16, 32].astype(int) - [200, 0, 0]).max() <= 6
    assert np.abs(picture[48, 32].astype(int) - 255).max() <= 2
    if name in ALPHA:
        np.testing.assert_array_equal(read_frames(path), read_frames(path, range(probe_file(path).num_frames)))
        assert np.abs(read_frames(path, [2])[0, 48, 32].astype(int) - 255).max() <= 2


def signal(nits: np.ndarray, transfer: str) -> np.ndarray:
    """Light on a display of 1,000 cd/m² as HLG or PQ in [0, 1] (BT.2100), by its inverse formulas."""
    if transfer == "pq":
        root = (nits / 10000) ** 0.1593017578125
        return ((0.8359375 + 18.8515625 * root) / (1 + 18.6875 * root)) ** 78.84375
    light = nits / 1000
    luminance = light @ [0.2627, 0.6780, 0.0593]
    scene = light * np.maximum(luminance, 1e-9)[..., None] ** (1 / 1.2 - 1)
    upper = 0.17883277 * np.log(np.maximum(12 * scene - 0.28466892, 1e-9)) + 0.55991073
    return np.where(scene <= 1 / 12, np.sqrt(3 * scene), upper)


HDR_FILES = {"a.mp4": "libx264", "b.mov": "libx265", "c.mkv": "libx265", "d.mp4": "libvpx-vp9", "e.webm": "libvpx-vp9"}


@pytest.mark.parametrize("name", HDR_FILES)
@pytest.mark.parametrize("transfer", ["hlg", "pq"])
def test_hdr_is_shown_with_the_colours_of_sdr(transfer: str, name: str, tmp_path: Path) -> None:
    srgb = np.array([[40, 40, 40], [118, 118, 118], [150, 60, 50], [50, 120, 60], [60, 70, 150], [140, 130, 60]])
    light = np.where(srgb <= 10, srgb / 255 / 12.92, ((srgb / 255 + 0.055) / 1.055) ** 2.4)
    to_bt2020 = np.array([[0.6274, 0.3293, 0.0433], [0.0691, 0.9195, 0.0114], [0.0164, 0.0880, 0.8956]])
    coded = signal(light @ to_bt2020.T * 203, transfer)
    pixels = np.round(coded * 65535).astype(np.uint16)[None].repeat(32, 0).repeat(32, 1)
    path, codec = tmp_path / name, HDR_FILES[name]
    pix_fmt = "yuv420p" if codec == "libvpx-vp9" else "yuv420p10le"  # this build of libvpx writes eight bits
    code = {"hlg": 18, "pq": 16}[transfer]
    # without B-frames: with them x265 gives a single frame a decoding time that it never set
    options = {"libx265": {"x265-params": "log-level=none:bframes=0"}, "libvpx-vp9": {"cpu-used": "8"}}
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=12, options=options.get(codec, {}))
        stream.height, stream.width, stream.pix_fmt = *pixels.shape[:2], pix_fmt
        for target in (stream.codec_context, frame := av.VideoFrame.from_ndarray(pixels, format="rgb48le")):
            target.color_primaries, target.color_trc, target.color_range = 9, code, 1
        stream.codec_context.colorspace = 9
        frame = VideoReformatter().reformat(frame, format=pix_fmt, dst_colorspace=Colorspace.BT2020, dst_color_range=1)
        frame.colorspace, frame.color_primaries, frame.color_trc, frame.color_range = 9, 9, code, 1
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    picture = read_frames(path, [0])[0]
    assert np.abs(picture[16, 16::32].astype(int) - srgb).max() <= 8


def test_hdr_highlights_rise_to_white_and_stay_in_order(tmp_path: Path) -> None:
    from longtake.data.clips.tone import HLG, PQ, tone_map

    nits = np.linspace(0, 1000, 256)[None, :, None].repeat(3, 2)
    for transfer, name in ((HLG, "hlg"), (PQ, "pq")):
        levels = tone_map(np.round(signal(nits, name) * 65535).astype(np.uint16), transfer)[0, :, 1].astype(int)
        assert (np.diff(levels) >= 0).all()
        assert levels[0] == 0
        assert levels[-1] >= 254
        assert 220 <= levels[52] <= 240, "diffuse white"


@pytest.mark.parametrize("suffix", [".mkv", ".mov", ".mp4"])
@pytest.mark.parametrize("preview", ["mjpeg", "libx264"])
def test_preview_of_one_frame_is_not_the_clip(suffix: str, preview: str, tmp_path: Path) -> None:
    path = tmp_path / f"a{suffix}"
    with av.open(str(path), "w") as container:
        small = container.add_stream(preview, rate=12)
        small.height, small.width, small.pix_fmt = 32, 32, "yuvj420p" if preview == "mjpeg" else "yuv420p"
        stream = container.add_stream("libx264", rate=12)
        stream.height, stream.width, stream.pix_fmt = 64, 96, "yuv420p"
        container.mux(small.encode(av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format="rgb24")))
        container.mux(small.encode())
        for _ in range(12):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(STORED, format="rgb24")))
        container.mux(stream.encode())
    assert_shown(path, STORED)
    assert probe_file(path).num_frames == len(read_frames(path)) == 12


@pytest.mark.parametrize("suffix", [".png", ".avif"])
def test_hdr_images_are_shown_with_the_colours_of_sdr(suffix: str, tmp_path: Path) -> None:
    grey = np.full((32, 32, 3), ((118 / 255 + 0.055) / 1.055) ** 2.4 * 203)
    image = Image.fromarray(np.round(signal(grey, "pq") * 255).astype(np.uint8))
    path = tmp_path / f"a{suffix}"
    if suffix == ".png":
        chunks = PngInfo()
        chunks.add(b"cICP", bytes([9, 16, 0, 1]))
        image.save(path, pnginfo=chunks)
    else:
        image.save(path, quality=95)
        data = bytearray(path.read_bytes())
        at = data.index(b"colrnclx") + 8
        data[at : at + 4] = struct.pack(">HH", 9, 16)
        path.write_bytes(data)
    assert np.abs(read_image(path)[0, 16, 16].astype(int) - 118).max() <= 6


P3_TO_SRGB = np.array([[1.2249, -0.2247, 0], [-0.0420, 1.0419, 0], [-0.0197, -0.0786, 1.0979]])
BT2020_TO_SRGB = np.array([[1.6605, -0.5876, -0.0728], [-0.1246, 1.1329, -0.0083], [-0.0182, -0.1006, 1.1187]])
MUTED = np.array([[40, 40, 40], [150, 60, 50], [50, 120, 60], [60, 70, 150], [140, 130, 60]])


def in_primaries(srgb: np.ndarray, to_srgb: np.ndarray) -> np.ndarray:
    """sRGB colours as bytes of other primaries, under sRGB's curve."""
    light = np.where(srgb <= 10, srgb / 255 / 12.92, ((srgb / 255 + 0.055) / 1.055) ** 2.4) @ np.linalg.inv(to_srgb).T
    curve = np.where(light <= 0.0031308, 12.92 * light, 1.055 * np.maximum(light, 0) ** (1 / 2.4) - 0.055)
    return np.round(curve * 255).astype(np.uint8)


@pytest.mark.parametrize(("code", "to_srgb"), [(12, P3_TO_SRGB), (9, BT2020_TO_SRGB)])
@pytest.mark.parametrize("name", ["a.mp4", "a.mkv"])
def test_wide_gamut_video_is_shown_with_the_colours_of_srgb(
    name: str, code: int, to_srgb: np.ndarray, tmp_path: Path
) -> None:
    pixels = in_primaries(MUTED, to_srgb)[None].repeat(32, 0).repeat(32, 1)
    with av.open(str(tmp_path / name), "w") as container:
        stream = container.add_stream("libx264", rate=12, options={"crf": "1"})
        stream.height, stream.width, stream.pix_fmt = *pixels.shape[:2], "yuv444p"
        frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
        frame = VideoReformatter().reformat(frame, format="yuv444p", dst_colorspace="ITU709")
        for target in (stream.codec_context, frame):
            target.color_primaries, target.color_trc, target.colorspace, target.color_range = code, 1, 1, 1
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    picture = read_frames(tmp_path / name, [0])[0]
    assert np.abs(picture[16, 16::32].astype(int) - MUTED).max() <= 8


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".webp", ".tiff"])
@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
def test_colour_profile_of_an_image_is_applied(suffix: str, mode: str, tmp_path: Path) -> None:
    if suffix == ".jpg" and mode == "RGBA":
        pytest.skip("JPEG has no alpha")
    pixels = in_primaries(MUTED, P3_TO_SRGB)[None].repeat(32, 0).repeat(32, 1)
    image = Image.fromarray(pixels).convert(mode)
    image.save(tmp_path / f"a{suffix}", icc_profile=display_p3(), quality=100)
    assert np.abs(read_image(tmp_path / f"a{suffix}")[0, 16, 16::32].astype(int) - MUTED).max() <= 6
    image.save(tmp_path / f"damaged{suffix}", icc_profile=display_p3()[:200], quality=100)
    shown = read_image(tmp_path / f"damaged{suffix}")[0, 16, 16::32].astype(int)
    assert np.abs(shown - pixels[16, 16::32].astype(int)).max() <= 6


def display_p3() -> bytes:
    """An ICC profile of P3's primaries with white D65 (adapted to D50) and a curve of 2.2, made tag by tag."""

    def fixed(*numbers: float) -> bytes:
        return b"".join(struct.pack(">i", round(number * 65536)) for number in numbers)

    xyz = {
        b"rXYZ": (0.5151, 0.2412, -0.0011),
        b"gXYZ": (0.2920, 0.6922, 0.0419),
        b"bXYZ": (0.1571, 0.0666, 0.7841),
        b"wtpt": (0.9642, 1.0, 0.8249),
    }
    tags = {name: b"XYZ \0\0\0\0" + fixed(*numbers) for name, numbers in xyz.items()}
    curve = b"para\0\0\0\0" + struct.pack(">HH", 3, 0) + fixed(2.4, 1 / 1.055, 0.055 / 1.055, 1 / 12.92, 0.04045)
    tags |= dict.fromkeys((b"rTRC", b"gTRC", b"bTRC"), curve)
    text = "P3 of a test".encode("utf-16-be")
    words = b"mluc\0\0\0\0" + struct.pack(">II2s2sII", 1, 12, b"en", b"US", len(text), 28) + text
    tags |= {b"desc": words, b"cprt": words}
    at, table, body = 128 + 4 + 12 * len(tags), b"", b""
    for name, data in tags.items():
        padded = data + bytes(-len(data) % 4)
        table += name + struct.pack(">II", at + len(body), len(data))
        body += padded
    size = at + len(body)
    head = struct.pack(">I4sI4s4s4s", size, b"lcms", 0x04300000, b"mntr", b"RGB ", b"XYZ ") + bytes(12) + b"acsp"
    head += bytes(128 - len(head) - 60) + fixed(0.9642, 1.0, 0.8249)
    return head + bytes(128 - len(head)) + struct.pack(">I", len(tags)) + table + body


def test_pixel_aspect_in_the_h265_header_alone_is_probed(tmp_path: Path) -> None:
    options = {"x265-params": "log-level=none"}
    path = write_clip(tmp_path / "a.mp4", codec="libx265", aspect=Fraction(4, 3), options=options)
    path.write_bytes(path.read_bytes().replace(b"pasp", b"free"))
    info = probe_file(path)
    assert read_frames(path, [0]).shape[1:3] == (info.height, info.width) == (64, 128)


def test_dolby_vision_without_a_base_picture_is_refused_with_what_converts_it(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "a.mp4", codec="libx265", options={"x265-params": "log-level=none"})
    path.write_bytes(path.read_bytes().replace(b"hev1", b"dvh1").replace(b"hvc1", b"dvh1"))
    for read in (probe_file, read_frames):
        with pytest.raises(ClipError, match=r"Dolby Vision .*ffmpeg .*libplacebo"):
            read(path)
