from __future__ import annotations

import contextlib
import io
import os
import struct
from collections.abc import Callable
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from longtake.data.clips import video
from longtake.data.clips.video import ClipError, read_frames, read_image, write_image, write_video
from longtake.data.probing.one_file import probe_file
from tests.data.made_clips import cut_without_decoding, decode_all, encode, noise_frames

SHORT_GOPS = {"g": "12"}
UNEVEN = np.cumsum([25, 20, 30, 25, 90, 10] * 7).tolist()

# file name -> (how it is encoded, whether frames in the middle are reached without decoding from the start)
FILES: dict[str, tuple[dict, bool]] = {
    "h264_b_frames.mp4": ({"options": {"g": "12", "bf": "3"}}, True),
    "h264_open_groups.mp4": ({"options": {"x264-params": "keyint=10:open-gop=1:bframes=3"}}, True),
    "h264_uneven.mp4": ({"options": SHORT_GOPS, "times": UNEVEN}, True),
    "h264_uneven.mkv": ({"options": SHORT_GOPS, "times": UNEVEN}, True),
    "h264_no_key_frames.mp4": ({"options": {"x264-params": "keyint=infinite:intra-refresh=1"}}, True),
    "h264_odd_size.mp4": ({"options": SHORT_GOPS, "size": (35, 51), "pix_fmt": "yuv444p"}, True),
    "h265_open_groups.mp4": ({"codec": "libx265", "options": {"x265-params": "keyint=10:log-level=none"}}, True),
    "mpeg4_b_frames.mp4": ({"codec": "mpeg4", "options": {"g": "12", "bf": "2"}}, True),
    "mpeg4.avi": ({"codec": "mpeg4", "options": {"g": "12", "bf": "2"}}, False),
    "vp9.webm": ({"codec": "libvpx-vp9", "options": {"g": "12", "cpu-used": "8"}}, True),
    "vp9.mp4": ({"codec": "libvpx-vp9", "options": {"g": "12", "cpu-used": "8"}}, True),
    "av1.mp4": ({"codec": "av1"}, True),
    "av1.mkv": ({"codec": "av1"}, True),
    "vp8_hidden_frames.webm": (
        {"codec": "libvpx", "options": {"g": "12", "auto-alt-ref": "1", "lag-in-frames": "10"}},
        False,
    ),
    "h264.ts": ({"options": SHORT_GOPS}, False),
    "animated.gif": ({"codec": "gif", "pix_fmt": "rgb8"}, False),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("videos")


def near_frame(path: Path, number: int) -> np.ndarray:
    """A frame reached without decoding from the start; `_NotCountable` where that cannot be exact."""
    [(places, pixels)] = video._decode(path, np.array([number]), near=True)
    assert places == [0]
    return pixels


@pytest.mark.parametrize("name", FILES)
def test_every_frame_is_the_one_a_full_decode_counts(name: str, folder: Path) -> None:
    settings, near = FILES[name]
    path = encode(folder / name, **settings)
    every = decode_all(path)
    assert len(every) == 40
    assert len(np.unique(every.reshape(40, -1), axis=0)) == 40, "the frames of the test must differ"
    for first in range(40):
        wanted = np.arange(first, min(first + 3, 40))
        np.testing.assert_array_equal(read_frames(path, wanted), every[wanted])
    np.testing.assert_array_equal(read_frames(path), every)
    for first in range(1, 40):
        if near:
            np.testing.assert_array_equal(near_frame(path, first), every[first])
        else:
            with pytest.raises(video._NotCountable):
                near_frame(path, first)


CUTS = {
    "h264": {"options": {"x264-params": "keyint=10:open-gop=0:bframes=3"}},
    "h264_open_groups": {"options": {"x264-params": "keyint=10:open-gop=1:bframes=3"}},
    "h265_open_groups": {"codec": "libx265", "options": {"x265-params": "keyint=10:log-level=none"}},
    "mpeg4": {"codec": "mpeg4", "options": {"g": "10", "bf": "2"}},
}


@pytest.mark.parametrize("kind", CUTS)
@pytest.mark.parametrize(("suffix", "hidden"), [(".mp4", 0), (".mkv", 0), (".mp4", 0.2)])
def test_a_losslessly_cut_file_is_counted_like_a_full_decode(
    kind: str, suffix: str, hidden: float, tmp_path: Path
) -> None:
    whole = encode(tmp_path / "whole.mp4", **CUTS[kind])
    path = cut_without_decoding(whole, tmp_path / f"cut{suffix}", key=2, hidden=hidden)
    every = decode_all(path)
    assert 5 <= len(every) < 40
    assert probe_file(path).num_frames == len(every)
    for first in range(len(every)):
        np.testing.assert_array_equal(read_frames(path, [first]), every[first : first + 1])


@pytest.mark.parametrize("suffix", [".mp4", ".mkv"])
def test_a_window_late_in_a_long_file_decodes_only_its_neighbourhood(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = encode(tmp_path / f"long{suffix}", count=400, size=(16, 16), options=SHORT_GOPS)
    decoded = 0
    original = video._frames_near

    def counting(*arguments: object) -> object:
        nonlocal decoded
        for item in original(*arguments):
            decoded += 1
            yield item

    monkeypatch.setattr(video, "_frames_near", counting)
    read_frames(path, np.arange(300, 310))
    assert 10 <= decoded <= 10 + 2 * 12 + 16


def test_frames_come_in_the_order_asked_for_with_repeats(tmp_path: Path) -> None:
    path = encode(tmp_path / "a.mp4", options=SHORT_GOPS)
    wanted = [30, 5, 5, 17]
    np.testing.assert_array_equal(read_frames(path, wanted), decode_all(path)[wanted])


@pytest.mark.parametrize(("degrees", "corner"), [(90, (-4, 4)), (-90, (4, -4)), (180, (-4, -4))])
def test_rotated_videos_are_read_upright(degrees: int, corner: tuple[int, int], tmp_path: Path) -> None:
    frames = np.zeros((3, 32, 48, 3), np.uint8)
    frames[:, :16, :24] = 255  # the upper left corner as stored
    path = tmp_path / "turned.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=24)
        stream.height, stream.width, stream.pix_fmt = 32, 48, "yuv420p"
        stream.set_display_rotation(degrees)
        for pixels in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    read = read_frames(path, [1])
    assert read.shape[1:3] == ((32, 48) if degrees == 180 else (48, 32))
    bright = [(y, x) for y in (4, -4) for x in (4, -4) if read[0, y, x].min() > 200]
    assert bright == [corner]


def test_a_frame_beyond_the_end_says_how_many_there_are(tmp_path: Path) -> None:
    path = encode(tmp_path / "a.mp4", count=10)
    with pytest.raises(ClipError, match=r"^frame 12 was asked for, but the file ends after 10 frames$"):
        read_frames(path, [0, 12])
    with pytest.raises(ClipError, match=r"^frame 12 was asked for, but the file ends after 10 frames$"):
        read_frames(path, [12])


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing.mp4": (lambda path: None, "no such file"),
    "folder.mp4": (lambda path: path.mkdir(), "is a folder, not a file"),
    "pipe.mp4": (lambda path: os.mkfifo(path), "is a pipe or device, not a file"),
    "empty.mp4": (lambda path: path.touch(), "the file is empty"),
    "text.mp4": (lambda path: path.write_text("a red circle moves left"), "cannot be decoded: Invalid data"),
    "without_its_index.mp4": (lambda path: (encode(path, count=5), _truncate(path)), "cannot be decoded"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_cannot_be_read_gives_its_reason(name: str, tmp_path: Path) -> None:
    make, reason = BROKEN[name]
    make(tmp_path / name)
    with pytest.raises(ClipError, match=f"^{reason}"):
        read_frames(tmp_path / name, [0])


def test_a_caption_file_is_not_a_video(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("hello\n" * 50)
    with pytest.raises(ClipError):
        read_frames(tmp_path / "x.txt", [0])


def test_a_sound_file_has_no_video_stream(tmp_path: Path) -> None:
    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=44100, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 44100
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    with pytest.raises(ClipError, match=r"^no video stream$"):
        read_frames(tmp_path / "a.mp4", [0])


@pytest.mark.parametrize("name", ["ünïcode ✓.mp4", "with space.mp4", "a:b.mp4", "%03d.mp4", "-i.mp4"])
def test_any_file_name_works(name: str, tmp_path: Path) -> None:
    frames = noise_frames(4)
    write_video(tmp_path / name, frames, 12)
    assert read_frames(tmp_path / name).shape == frames.shape


@pytest.mark.parametrize("size", [(32, 48), (35, 50), (34, 51), (35, 51), (1, 1)])
def test_a_written_video_keeps_size_count_rate_and_colours(size: tuple[int, int], tmp_path: Path) -> None:
    frames = np.empty((6, *size, 3), np.uint8)
    frames[:] = (200, 100, 30)
    write_video(tmp_path / "a.mp4", frames, fps=23.976, crf=10)
    read = read_frames(tmp_path / "a.mp4")
    assert read.shape == frames.shape
    assert np.abs(read.astype(int) - frames).max() <= 3
    with av.open(str(tmp_path / "a.mp4")) as container:
        stream = container.streams.video[0]
        assert stream.codec_context.name == "h264"
        assert float(stream.average_rate) == pytest.approx(23.976, abs=1e-3)
    assert [path.name for path in tmp_path.iterdir()] == ["a.mp4"], "nothing else is left behind"


def test_a_video_that_cannot_be_finished_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_video(tmp_path / "a.mp4", noise_frames(2), 8)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("pixels", "found"),
    [(np.zeros((2, 4, 4, 3), np.float32), "float32"), (np.zeros((2, 3, 4, 4), np.uint8), r"\[2, 3, 4, 4\]")],
)
def test_wrong_pixels_are_refused_before_writing(pixels: np.ndarray, found: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=found):
        write_video(tmp_path / "a.mp4", pixels, 8)


def test_pictures_come_back_as_written(tmp_path: Path) -> None:
    pixels = noise_frames(1)[0]
    write_image(tmp_path / "a.png", pixels)
    np.testing.assert_array_equal(read_image(tmp_path / "a.png"), pixels[None])


def test_the_exif_orientation_is_applied(tmp_path: Path) -> None:
    image = Image.fromarray(noise_frames(1, 16, 40)[0])
    exif = image.getexif()
    exif[0x0112] = 6  # to be turned clockwise by 90 degrees
    image.save(tmp_path / "a.png", exif=exif)
    np.testing.assert_array_equal(read_image(tmp_path / "a.png")[0], np.rot90(np.asarray(image), -1))


def test_transparency_shows_white_and_grey_and_16_bits_become_rgb(tmp_path: Path) -> None:
    Image.new("RGBA", (2, 1), (255, 0, 0, 0)).save(tmp_path / "clear.png")
    Image.new("L", (2, 1), 77).save(tmp_path / "grey.png")
    Image.fromarray(np.array([[0, 0x1234, 0xFFFF]], np.uint16)).save(tmp_path / "deep.png")
    palette = Image.new("P", (2, 1), 0)
    palette.putpalette([9, 8, 7])
    palette.save(tmp_path / "palette.png")
    assert read_image(tmp_path / "clear.png").tolist() == [[[[255, 255, 255]] * 2]]
    assert read_image(tmp_path / "grey.png").tolist() == [[[[77, 77, 77]] * 2]]
    assert read_image(tmp_path / "deep.png")[0, 0, :, 0].tolist() == [0, 0x12, 0xFF]
    assert read_image(tmp_path / "palette.png").tolist() == [[[[9, 8, 7]] * 2]]


def test_a_damaged_picture_gives_its_reason(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    Image.fromarray(noise_frames(1, 200, 200)[0]).save(buffer, "jpeg")
    (tmp_path / "cut.jpg").write_bytes(buffer.getvalue()[:-400])
    (tmp_path / "text.png").write_text("not a picture")
    (tmp_path / "empty.png").touch()
    for name, reason in [("cut.jpg", "truncated"), ("text.png", "not a picture"), ("empty.png", "empty")]:
        with pytest.raises(ClipError, match=reason):
            read_image(tmp_path / name)


def test_a_video_of_an_unknown_codec_says_so(tmp_path: Path) -> None:
    data = encode(tmp_path / "a.mp4", count=3).read_bytes()
    entry = data.index(b"avc1", data.index(b"stsd"))
    (tmp_path / "z.mp4").write_bytes(data[:entry] + b"zzzz" + data[entry + 4 :])
    for read in (probe_file, read_frames):
        with pytest.raises(ClipError, match=r"^the video's codec is unknown to FFmpeg$"):
            read(tmp_path / "z.mp4")


STRANGE = [AttributeError("no x"), TypeError("a\nb"), OverflowError("big"), MemoryError(), struct.error("4 bytes")]


@pytest.mark.parametrize("error", STRANGE, ids=lambda error: type(error).__name__)
def test_whatever_a_decoder_raises_is_the_files_fault(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    encode(tmp_path / "a.mkv", count=3)
    write_image(tmp_path / "a.png", noise_frames(1)[0])
    monkeypatch.setattr(video.av, "open", fail)
    monkeypatch.setattr(Image, "open", fail)
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    for read, name in [(read_frames, "a.mkv"), (probe_file, "a.mkv"), (read_image, "a.png"), (probe_file, "a.png")]:
        with pytest.raises(ClipError, match=" ".join(text.split()) + "$"):
            read(tmp_path / name)


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@pytest.mark.parametrize("suffix", [".mp4", ".mkv", ".tif", ".png", ".jpg", ".webp"])
def test_files_with_wrong_bytes_give_frames_or_a_reason(suffix: str, tmp_path: Path) -> None:
    path, still = tmp_path / f"a{suffix}", video.is_image(f"a{suffix}")
    if still:
        write_image(path, noise_frames(1, 32, 32)[0])
    else:
        encode(path, count=4, size=(32, 32))
    whole, rng = np.frombuffer(path.read_bytes(), np.uint8), np.random.default_rng(0)
    for _ in range(60):
        data = whole.copy()
        places = rng.integers(0, len(data), 4)
        places[:2] = rng.integers(0, min(len(data), 200), 2)
        data[places] = rng.integers(0, 256, 4)
        if suffix == ".tif":  # the directory lies at the end
            data[-rng.integers(1, 150)] = rng.integers(0, 256)
        path.write_bytes(data.tobytes())
        for read in (probe_file, read_image if still else read_frames):
            with contextlib.suppress(ClipError):
                read(path)


def test_a_relative_name_that_looks_like_an_address_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frames = noise_frames(4, 16, 16)
    write_video(tmp_path / "a:b.mp4", frames, 8)
    monkeypatch.chdir(tmp_path)
    assert probe_file("a:b.mp4").num_frames == 4
    read = read_frames("a:b.mp4", np.arange(4))
    assert np.array_equal(read, read_frames(tmp_path / "a:b.mp4", np.arange(4)))
