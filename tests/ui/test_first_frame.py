"""A first frame in the form becomes that of the video, for a model that takes one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from longtake.data.clips.video import write_image
from longtake.generate.run import read_video
from longtake.ui.generate import FIELDS, VideoForm
from longtake.ui.queue import Queue
from longtake.ui.roots import Roots
from tests.generate.runs import write_config
from tests.train.runs import run_command, train_here

GIVEN = ("--ae.temporal", "1", "--model.in-channels", "192", "--model.cond-embed", "True")
GIVEN += ("--condition_config.t2v", "1", "--condition_config.i2v_head", "2")


def test_a_video_begins_with_the_frame_of_the_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train_here(write_config(tmp_path), *GIVEN)[0].folder
    roots = Roots.of([tmp_path])
    queue = Queue(roots.own / "queue")
    picture = roots.uploads / "first.png"
    picture.parent.mkdir(parents=True, exist_ok=True)
    write_image(picture, np.full((32, 32, 3), 200, np.uint8))
    form = dict.fromkeys(FIELDS) | {"model": str(run), "prompt": "a red circle moves left", "num_sample": 1}
    form |= {"ref": str(picture), "lora_scale": 1}
    command, facts = VideoForm(roots, queue).preview(*form.values())
    assert "--cond-type i2v_head --ref" in command, facts
    job = queue.job(VideoForm(roots, queue).ask(*form.values()))
    assert job is not None
    code, _, error = run_command(capsys, job.words)
    assert code == 0, error
    (path,) = (roots.own / "videos").rglob("*.mp4")
    distances = np.abs(read_video(path).astype(float) - 200).mean(axis=(1, 2, 3))
    assert distances[0] < 10 < distances[-1]


@pytest.mark.parametrize(
    ("model", "label"),
    [
        ("cogvideox_fun/t2v", "Height : width"),
        ("cogvideox_fun/v2v_control", "Height : width"),
        ("opensora_v1_2/240p", "Height : width"),
        ("opensora_v2/256px", "Width : height"),
        ("ttt_video/ttt_linear_3s", "Width : height"),
        ("no such model", "Width : height"),
    ],
)
def test_form_ratios_are_labelled_as_the_tables_of_the_model_have_them(tmp_path: Path, model: str, label: str) -> None:
    roots = Roots.of([tmp_path])
    assert VideoForm(roots, Queue(roots.own / "queue")).ratio_label(model) == label
