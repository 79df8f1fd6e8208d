"""Files of every common kind, made here: the container's numbers against a full decode by the plainest loop."""

from __future__ import annotations

import struct
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from longtake.data.clips.video import ClipError, open_video, read_frames
from longtake.data.probing import one_file
from longtake.data.probing.one_file import ClipInfo, _probe_by_ffmpeg, _probe_by_index, probe_file
from tests.data.made_clips import cut_without_decoding, decode_all, encode, noise_frames

UNEVEN = np.cumsum([25, 20, 30, 25, 90, 10] * 4).tolist()
B_FRAMES = {"g": "12", "bf": "3"}
HEVC = {"codec": "libx265", "options": {"x265-params": "keyint=10:log-level=none:pools=1:frame-threads=1"}}
VP9 = {"codec": "libvpx-vp9", "options": {"g": "12", "cpu-used": "8", "deadline": "realtime"}}
AV1 = {"codec": "av1"}
MPEG4 = {"codec": "mpeg4", "options": {"g": "12", "bf": "2"}}
GIF = {"codec": "gif", "pix_fmt": "rgb8"}
FRAGMENTED = {"movflags": "frag_keyframe+empty_moov+default_base_moof"}

# file name -> how it is encoded
ZOO: dict[str, dict] = {
    "h264.mp4": {"options": B_FRAMES},
    "h264.mov": {"options": B_FRAMES},
    "h264.mkv": {"options": B_FRAMES},
    "h264.avi": {"options": {"g": "12", "bf": "0"}},
    "h264.ts": {"options": B_FRAMES},
    "hevc.mp4": HEVC,
    "hevc.mov": HEVC,
    "hevc.mkv": HEVC,
    "hevc.ts": HEVC,
    "vp9.mp4": VP9,
    "vp9.webm": VP9,
    "vp9.mkv": VP9,
    "av1.mp4": AV1,
    "av1.webm": AV1,
    "av1.mkv": AV1,
    "mpeg4.mp4": MPEG4,
    "mpeg4.avi": MPEG4,
    "mpeg4.mkv": MPEG4,
    "animated.gif": GIF,
    "odd.mp4": {"size": (35, 51), "pix_fmt": "yuv444p"},
    "cropped.mp4": {"size": (50, 70)},  # no multiple of 16: the header cuts the coded picture
    "422.mov": {"size": (50, 70), "pix_fmt": "yuv422p"},
    "ten_bits.mp4": {"pix_fmt": "yuv420p10le"},
    "hevc_cropped.mp4": {**HEVC, "size": (50, 70)},
    "hevc_odd.mov": {**HEVC, "size": (35, 51), "pix_fmt": "yuv444p"},
    "odd.webm": {**VP9, "size": (35, 51)},
    "turned.mp4": {"rotation": 90},
    "turned.mov": {"rotation": -90},
    "turned.mkv": {"rotation": 90},
    "hevc_turned.mp4": {**HEVC, "rotation": 90},
    "half_turned.mp4": {"rotation": 180},
    "uneven.mp4": {"options": B_FRAMES, "times": UNEVEN},
    "uneven.mkv": {"options": B_FRAMES, "times": UNEVEN},
    "uneven.webm": {**VP9, "times": UNEVEN},
    "single.mp4": {"count": 1},
    "single.mkv": {"count": 1},
    "single.webm": {**VP9, "count": 1},
    "single.gif": {**GIF, "count": 1},
    "single_hevc.mp4": {"codec": "libx265", "options": {"x265-params": "bframes=0:log-level=none"}, "count": 1},
    "single.ts": {"count": 1},
    "ntsc.mp4": {"fps": Fraction(30000, 1001)},
    "an ünïcode ✓ name.mp4": {},
    "öffnen (1) #2%20.mkv": {},
}
BY_INDEX = [name for name in ZOO if name.endswith((".mp4", ".mov")) and name[:3] not in ("vp9", "av1", "mpe", "sin")]
TURNED = {"turned.mp4", "turned.mov", "turned.mkv", "hevc_turned.mp4"}
CODECS = {"h264", "hevc", "vp9", "av1", "mpeg4", "gif"}


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all of `ZOO`."""
    folder = tmp_path_factory.mktemp("zoo")
    for name, settings in ZOO.items():
        encode(folder / name, **{"count": 24} | settings)
    return folder


@pytest.mark.parametrize("name", ZOO)
def test_the_numbers_are_those_of_a_full_decode(name: str, zoo: Path) -> None:
    info, every = probe_file(zoo / name), decode_all(zoo / name)
    height, width = every.shape[1:3]
    assert info.num_frames == len(every) == ZOO[name].get("count", 24)
    assert (info.height, info.width) == ((width, height) if name in TURNED else (height, width))
    assert (info.height, info.width) == read_frames(zoo / name, [0]).shape[1:3]
    assert info.codec in CODECS
    assert probe_file(zoo / name, decode_check=True) == info


@pytest.mark.parametrize("name", ZOO)
def test_rate_and_length_are_those_of_a_full_decodes_timestamps(name: str, zoo: Path) -> None:
    """Rates to 1 % and two ticks of the file's clock, lengths to one mean step: headers round both."""
    info, (count, span, tick) = probe_file(zoo / name), _decoded_times(zoo / name)
    if count == 1:
        assert info.duration == pytest.approx(1 / info.fps, abs=0.02)
        return
    step = span / (count - 1)
    assert info.fps == pytest.approx(1 / step, rel=0.01 + 2 * tick / span)
    assert info.duration == pytest.approx(span + step, abs=step)


@pytest.mark.parametrize("name", ["screen.mkv", "screen.webm", "screen.flv", "screen.ts", "screen.avi", "screen.mp4"])
def test_frames_with_gaps_between_them_give_one_rate_and_length_in_every_container(name: str, tmp_path: Path) -> None:
    """As a recorder of the screen or a camera in the dark writes them: a third of the frames of a 30 Hz clock."""
    times = np.sort(np.random.default_rng(0).choice(300, 100, replace=False)) * 20
    codec = VP9 if name.endswith("webm") else {"codec": "mpeg4"} if name.endswith("avi") else {}
    info = probe_file(encode(tmp_path / name, count=100, fps=30, times=times.tolist(), **codec))
    span = (times[-1] - times[0]) / 600
    assert info.num_frames == 100
    assert info.fps == pytest.approx(99 / span, rel=0.01)
    assert info.duration == pytest.approx(span * 100 / 99, rel=0.015)


@pytest.mark.parametrize("suffix", [".mkv", ".webm"])
@pytest.mark.parametrize("fps", [24, 25, 30, 50])
def test_the_rate_behind_a_clock_of_milliseconds_is_found(suffix: str, fps: int, tmp_path: Path) -> None:
    """As a browser records: the file says 1000 frames a second, of which most never come."""
    times = (600 // fps * np.arange(60)).tolist()
    path = encode(tmp_path / f"a{suffix}", count=60, fps=1000, times=times, **(VP9 if suffix == ".webm" else {}))
    with av.open(str(path)) as container:
        assert container.streams.video[0].average_rate == 1000
    info = probe_file(path)
    assert (info.num_frames, info.fps) == (60, fps)
    assert info.duration == pytest.approx(60 / fps, abs=1 / fps)


NO_KEY_FIRST = {
    "h264.mp4": {"options": {"x264-params": "keyint=10:open-gop=0:bframes=3"}},
    "hevc.mp4": {"codec": "libx265", "options": {"x265-params": "keyint=10:open-gop=1:bframes=3:log-level=none"}},
    "mpeg4.mp4": {"codec": "mpeg4", "options": {"g": "10", "bf": "2"}},
    "vp9.mp4": {**VP9, "options": {"g": "10", "cpu-used": "8"}},
}


@pytest.mark.parametrize("suffix", [".mp4", ".mkv"])
@pytest.mark.parametrize("name", NO_KEY_FIRST)
def test_a_file_that_begins_without_a_key_frame_is_counted_as_it_decodes(
    name: str, suffix: str, tmp_path: Path
) -> None:
    path = _without_packets(
        encode(tmp_path / name, **NO_KEY_FIRST[name]), tmp_path / f"cut{suffix}", lambda n, _: n < 4
    )
    try:
        every = decode_all(path)
    except (av.FFmpegError, ValueError):  # no frame, or none before an error
        with pytest.raises(ClipError, match=r"cannot be decoded: |no frame can be decoded"):
            probe_file(path)
        return
    assert 0 < len(every) < 40
    assert probe_file(path).num_frames == len(every)
    for number in (0, 3, len(every) - 1):
        np.testing.assert_array_equal(read_frames(path, [number])[0], every[number])


@pytest.mark.parametrize("suffix", [".mp4", ".mkv"])
def test_a_file_without_any_key_frame_is_bad_with_a_reason(suffix: str, tmp_path: Path) -> None:
    whole = encode(tmp_path / "whole.mp4", options={"g": "10", "bf": "0"})
    path = _without_packets(whole, tmp_path / f"cut{suffix}", lambda _, packet: packet.is_keyframe)
    for probe in (probe_file, _probe_by_ffmpeg):
        with pytest.raises(ClipError, match="no frame can be decoded"):
            probe(path)


def count_frames(path: Path, way: str) -> int | None:
    """The frames of a video counted in one way only; None where that way cannot be trusted with this file."""
    if way == "header" and (info := _probe_by_index(path)):
        return info.num_frames
    with open_video(path) as (container, stream):
        if way == "frames":
            return one_file._decode_through(container, stream).times.count
        packets = one_file._packets(container, stream)
        if packets is None:
            return None
        if way == "header":
            return one_file._count_by_header(path, container, stream)
        return sum(map(one_file._is_frame, packets))


@pytest.mark.parametrize("name", ZOO)
def test_header_packets_and_frames_give_one_count(name: str, zoo: Path) -> None:
    counts = {way: count_frames(zoo / name, way) for way in ("header", "packets", "frames")}
    assert counts["frames"] == ZOO[name].get("count", 24)
    assert set(counts.values()) <= {counts["frames"], None}
    if name.endswith((".mp4", ".mov")):
        assert counts["header"] == counts["packets"] == counts["frames"]


@pytest.mark.parametrize("name", BY_INDEX)
def test_the_index_alone_says_what_ffmpeg_says(name: str, zoo: Path) -> None:
    assert _probe_by_index(zoo / name) == _probe_by_ffmpeg(zoo / name)


def test_a_fragmented_file_is_counted_by_packets(tmp_path: Path, zoo: Path) -> None:
    for name in ("h264.mp4", "hevc.mp4"):
        path = _rewrite(zoo / name, tmp_path / name, FRAGMENTED)
        assert _probe_by_index(path) is None
        assert count_frames(path, "header") is None
        assert probe_file(path).num_frames == count_frames(path, "packets") == len(decode_all(path)) == 24


def test_sound_beside_the_picture_changes_nothing(tmp_path: Path, zoo: Path) -> None:
    for name in ("h264.mp4", "h264.mov", "h264.mkv"):
        path = _rewrite(zoo / name, tmp_path / name, sound=True)
        info = probe_file(path)
        assert (info.num_frames, info.height, info.width, info.fps) == (24, 48, 64, 24.0)
        if name != "h264.mkv":
            assert _probe_by_index(path) == _probe_by_ffmpeg(path)


@pytest.mark.parametrize("suffix", [".mp4", ".mov"])
def test_an_edit_list_that_hides_frames_is_left_to_a_closer_look(suffix: str, tmp_path: Path) -> None:
    whole = encode(tmp_path / f"whole{suffix}", options={"g": "10", "bf": "3"})
    path = cut_without_decoding(whole, tmp_path / f"cut{suffix}", key=2, hidden=0.2)
    assert _probe_by_index(path) is None
    assert probe_file(path).num_frames == len(decode_all(path)) < 40


def test_a_turn_of_the_whole_film_is_seen(tmp_path: Path, zoo: Path) -> None:
    data = bytearray((zoo / "h264.mp4").read_bytes())
    at = data.index(b"mvhd") + 4 + 36
    data[at : at + 20] = struct.pack(">ii4xii", 0, 1 << 16, -(1 << 16), 0)
    (tmp_path / "a.mp4").write_bytes(data)
    assert read_frames(tmp_path / "a.mp4", [0]).shape[1:3] == (64, 48)
    for info in (_probe_by_index(tmp_path / "a.mp4"), _probe_by_ffmpeg(tmp_path / "a.mp4")):
        assert (info.height, info.width) == (64, 48)


def test_two_opinions_of_the_size_are_left_to_ffmpeg(tmp_path: Path, zoo: Path) -> None:
    data = bytearray((zoo / "h264.mp4").read_bytes())
    at = data.index(b"avc1", data.index(b"stsd")) + 4 + 24
    assert struct.unpack_from(">HH", data, at) == (64, 48)
    data[at : at + 4] = struct.pack(">HH", 60, 46)
    (tmp_path / "a.mp4").write_bytes(data)
    assert _probe_by_index(tmp_path / "a.mp4") is None
    info = probe_file(tmp_path / "a.mp4")
    assert (info.height, info.width) == decode_all(tmp_path / "a.mp4").shape[1:3] == (46, 60)


TRUNCATED = ["h264.mp4", "h264.mov", "h264.mkv", "h264.avi", "h264.ts", "vp9.webm", "mpeg4.avi", "animated.gif"]


@pytest.mark.parametrize("name", TRUNCATED)
@pytest.mark.parametrize("left", [0.05, 0.4, 0.75, 0.95])
def test_a_truncated_file_gives_what_is_left_or_its_reason(name: str, left: float, zoo: Path, tmp_path: Path) -> None:
    path = _cut(zoo / name, tmp_path / name, left)
    try:
        whole = len(decode_all(path))
    except (av.FFmpegError, ValueError, IndexError):
        whole = None
    try:
        found = probe_file(path).num_frames
    except ClipError:
        found = None
    assert found in ({None, whole} if name.endswith((".mp4", ".mov")) else {whole})


@pytest.mark.parametrize("name", ["h264.mp4", "hevc.mp4", "turned.mov", "uneven.mp4"])
def test_a_damaged_index_never_gives_wrong_numbers(name: str, zoo: Path, tmp_path: Path) -> None:
    """Some bytes of the index are changed, 100 times over: the numbers are FFmpeg's, or there are none."""
    whole, generator = (zoo / name).read_bytes(), np.random.default_rng(0)
    path, start, compared = tmp_path / name, whole.index(b"moov"), 0
    for _ in range(100):
        data = bytearray(whole)
        for at in generator.integers(start, len(data), generator.integers(1, 4)):
            data[at] = generator.choice([0, 1, 255, generator.integers(256)])
        path.write_bytes(data)
        by_index = _probe_by_index(path)
        if by_index is None:
            continue
        try:
            by_ffmpeg = _probe_by_ffmpeg(path)
        except ClipError:  # it minds what cannot change a number; the clip fails when it is read
            continue
        compared += 1
        assert (by_index.num_frames, by_index.height, by_index.width, by_index.fps) == (
            *(by_ffmpeg.num_frames, by_ffmpeg.height, by_ffmpeg.width),
            by_ffmpeg.fps,
        )
    assert compared > 20


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("empty.mp4", b"", "the file is empty"),
        ("text.mp4", b"hello " * 99, "cannot be decoded"),
        ("zeros.mov", bytes(9000), "cannot be decoded"),
        ("only_a_box.mp4", b"\0\0\0\x08ftyp", "cannot be decoded"),
        ("text.png", b"hello", "not a picture of a known format"),
    ],
)
def test_what_is_no_video_says_so(name: str, content: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ClipError, match=reason):
        probe_file(tmp_path / name)


def test_missing_files_and_sound_alone_say_so(tmp_path: Path, zoo: Path) -> None:
    with pytest.raises(ClipError, match="no such file"):
        probe_file(tmp_path / "gone.mp4")
    for name in ("h264.mp4", "h264.mkv"):
        path = _rewrite(zoo / name, tmp_path / name, sound=True, picture=False)
        with pytest.raises(ClipError, match="no video stream"):
            probe_file(path)


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp"])
def test_stills_are_read_by_their_header(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a b ü.{suffix}"
    Image.fromarray(noise_frames(1, 41, 62)[0]).save(path)
    info = probe_file(path, decode_check=True)
    assert (info.num_frames, info.height, info.width) == (1, 41, 62)
    assert info.codec == {"jpg": "jpeg"}.get(suffix, suffix)


@pytest.mark.parametrize("name", ["h264.mp4", "hevc.mkv", "vp9.webm"])
def test_decode_check_finds_files_that_open_but_do_not_decode(name: str, zoo: Path, tmp_path: Path) -> None:
    data = bytearray((zoo / name).read_bytes())
    start = data.index(b"mdat") + 200 if name.endswith("mp4") else len(data) // 2
    data[start : start + 600] = bytes(600)
    (tmp_path / name).write_bytes(data)
    assert isinstance(probe_file(tmp_path / name), ClipInfo)
    with pytest.raises(ClipError):
        probe_file(tmp_path / name, decode_check=True)


@pytest.mark.parametrize("name", ["h264.mkv", "vp9.webm", "animated.gif"])
def test_decode_check_says_the_same_of_a_file_whatever_was_checked_before(name: str, zoo: Path, tmp_path: Path) -> None:
    path = _cut(zoo / name, tmp_path / name, 0.7)
    skipping = av.logging.get_skip_repeated()
    reasons = set()
    for _ in range(3):
        with pytest.raises(ClipError) as raised:
            probe_file(path, decode_check=True)
        reasons.add(str(raised.value))
    assert len(reasons) == 1
    assert av.logging.get_skip_repeated() is skipping


def test_decode_check_finds_stills_that_are_cut_short(tmp_path: Path) -> None:
    for suffix in ("jpg", "png"):
        path = tmp_path / f"a.{suffix}"
        Image.fromarray(noise_frames(1, 200, 200)[0]).save(path)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        assert probe_file(path).height == 200
        with pytest.raises(ClipError, match="cannot be read"):
            probe_file(path, decode_check=True)


def _decoded_times(path: Path) -> tuple[int, float, float]:
    """Frames of a full decode, seconds from the first to the last, and seconds of a tick."""
    with av.open(str(path)) as container:
        times = [frame.pts for frame in container.decode(video=0)]
        tick = container.streams.video[0].time_base
    return len(times), float((max(times) - min(times)) * tick), float(tick)


def _without_packets(source: Path, target: Path, leave_out: Callable[[int, av.Packet], bool]) -> Path:
    with av.open(str(source)) as old, av.open(str(target), "w") as new:
        stream = new.add_stream_from_template(old.streams.video[0])
        for number, packet in enumerate(old.demux(old.streams.video[0])):
            if packet.size and not leave_out(number, packet):
                packet.stream = stream
                new.mux(packet)
    return target


def _cut(source: Path, target: Path, left: float) -> Path:
    data = source.read_bytes()
    target.write_bytes(data[: int(len(data) * left)])
    return target


def _rewrite(
    source: Path, target: Path, options: dict[str, str] | None = None, sound: bool = False, picture: bool = True
) -> Path:
    """Copies the packets into a new container, with other options, or with a second of sound before them."""
    with av.open(str(source)) as old, av.open(str(target), "w", options=options or {}) as new:
        noise = new.add_stream("aac", rate=48000) if sound else None
        stream = new.add_stream_from_template(old.streams.video[0]) if picture else None
        if noise is not None:
            for number in range(46):
                frame = av.AudioFrame.from_ndarray(np.zeros((2, 1024), np.float32), format="fltp", layout="stereo")
                frame.sample_rate, frame.pts = 48000, number * 1024
                new.mux(noise.encode(frame))
            new.mux(noise.encode())
        for packet in old.demux(old.streams.video[0]) if picture else ():
            if packet.size:
                packet.stream = stream
                new.mux(packet)
    return target
