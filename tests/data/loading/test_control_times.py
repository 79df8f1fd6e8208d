"""Frames of control videos are those shown at the times of the clip's frames."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from longtake.data import ClipTable, probe_table, write_video
from longtake.data.rules import Companion, SampleRules
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
