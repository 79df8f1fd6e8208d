"""Frames of clips, control videos and references are those that a player shows at their times."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from longtake.data.clips.video import write_video
from longtake.data.loading.controls import control_lines
from longtake.data.probing.one_file import probe_file
from longtake.data.probing.probe import probe_table
from longtake.data.rules import Companion, SampleRules
from longtake.data.tables.table import ClipTable
from longtake.diffusion.known import Window
from longtake.generate.references import frame_numbers
from tests.data.made_clips import make_dataset, make_slot

CONTROL = Companion("control", "control", "video", "control")


@pytest.mark.parametrize(("rate", "count"), [(24, 40), (12, 20), (6, 10)])
def test_control_of_another_rate_is_read_by_time(rate: int, count: int, tmp_path: Path) -> None:
    levels = {12: np.arange(20) * 10, rate: np.arange(count) * 10 * 12 // rate}  # grey rises with time
    for name, fps in (("clip", 12), ("control", rate)):
        frames = np.broadcast_to(levels[fps][:, None, None, None], (len(levels[fps]), 16, 16, 3)).astype(np.uint8)
        write_video(tmp_path / f"{name}.mp4", frames, fps, crf=5)
    pq.write_table(pa.table({"path": ["clip.mp4"], "text": ["x"], "control": ["control.mp4"]}), tmp_path / "t.parquet")
    probe_table(tmp_path / "t.parquet", tmp_path / "clips.parquet")
    table = ClipTable.open(tmp_path / "clips.parquet", captions=("text", "control"))
    batch = make_dataset(table, rules=SampleRules(companions=(CONTROL,)))[make_slot(table, [0], (9, 16, 16))]
    assert batch.faults == ()
    clip, control = (x[0, 0, :, 8, 8].float() for x in (batch.video, batch.companions["control"]))
    assert (clip - control).abs().max() <= 10 * 12 / min(rate, 12) / 2 + 5
    assert clip[-1] - clip[0] == pytest.approx(80, abs=6)


def write_uneven(path: Path, times: list[int]) -> None:
    """A video whose frames are shown at these milliseconds; grey rises by 10 for each frame."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=1000, options={"crf": "5", "bf": "0"})
        stream.width = stream.height = 16
        stream.pix_fmt, stream.codec_context.time_base = "yuv420p", Fraction(1, 1000)
        for number, time in enumerate(times):
            frame = av.VideoFrame.from_ndarray(np.full((16, 16, 3), 10 * number, np.uint8), format="rgb24")
            frame.pts, frame.time_base = time, Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def shown_level(times: list[int], second: float) -> int:
    """The grey level that a player shows at a time."""
    return 10 * max(number for number, time in enumerate(times) if time <= 1000 * second + 1)


# A screen recording: 12 frames of a moment of motion, one that stands for a second, and motion again.
UNEVEN = [*range(0, 480, 40), *range(1440, 1920, 40)]


@pytest.mark.parametrize("suffix", ["mp4", "mkv", "mov"])
def test_frames_at_uneven_times_are_read_as_they_are_shown(suffix: str, tmp_path: Path) -> None:
    write_uneven(tmp_path / f"clip.{suffix}", UNEVEN)
    pq.write_table(pa.table({"path": [f"clip.{suffix}"], "text": ["x"]}), tmp_path / "t.parquet")
    probe_table(tmp_path / "t.parquet", tmp_path / "clips.parquet")
    table = ClipTable.open(tmp_path / "clips.parquet")
    assert table.uneven_times.tolist() == [1]
    batch = make_dataset(table)[make_slot(table, [0], (24, 16, 16))]
    assert batch.faults == ()
    expected = [shown_level(UNEVEN, number / float(table.fps[0])) for number in range(24)]
    levels = batch.video[0, 0, :, 8, 8].tolist()
    assert all(abs(level - right) <= 4 for level, right in zip(levels, expected, strict=True)), (levels, expected)


def test_frames_at_steady_times_are_not_looked_up(tmp_path: Path) -> None:
    write_uneven(tmp_path / "clip.mp4", [40 * number + (number % 3) for number in range(20)])  # a phone's jitter
    assert not probe_file(tmp_path / "clip.mp4").uneven_times


def test_reference_of_uneven_times_keeps_its_speed(tmp_path: Path) -> None:
    write_uneven(tmp_path / "ref.mkv", UNEVEN)
    config = SimpleNamespace(kind="v2v_head", fps_save=12.5, quirks=frozenset())
    numbers = frame_numbers(str(tmp_path / "ref.mkv"), Window(range(4), range(16)), config)
    expected = [shown_level(UNEVEN, i / 12.5) // 10 for i in range(16)]
    assert np.abs(numbers - expected).max() <= 1  # nearest in time, of frames 40 ms apart
    assert set(numbers[7:16].tolist()) == {11}  # the frame that stands for a second


@pytest.mark.parametrize(("size", "count"), [((16, 32), 20), ((16, 16), 9)])
def test_control_that_does_not_fit_costs_its_row_and_is_named_before_the_first_step(
    size: tuple[int, int], count: int, tmp_path: Path
) -> None:
    write_video(tmp_path / "clip.mp4", np.zeros((20, 16, 16, 3), np.uint8), 12)
    write_video(tmp_path / "control.mp4", np.zeros((count, *size, 3), np.uint8), 12)
    pq.write_table(pa.table({"path": ["clip.mp4"], "text": ["x"], "control": ["control.mp4"]}), tmp_path / "t.parquet")
    probe_table(tmp_path / "t.parquet", tmp_path / "clips.parquet")
    table = ClipTable.open(tmp_path / "clips.parquet", captions=("text", "control"))
    batch = make_dataset(table, rules=SampleRules(companions=(CONTROL,)))[make_slot(table, [0], (20, 16, 16))]
    reason = "aspect ratio" if size == (16, 32) else "lasts 0.75 s"
    assert reason in batch.faults[0].reason
    (line,) = control_lines(table, [CONTROL])
    assert "1 of 1 clips" in line
    assert "control.mp4: " in line
    assert reason in line
