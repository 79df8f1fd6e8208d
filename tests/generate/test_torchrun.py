from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from longtake.data.clips.video import write_image
from longtake.generate.run import read_video
from longtake.train.run import Outcome
from tests.precision import within
from tests.train.runs import finish, start

PROMPTS = ["a red circle moves left", "a blue square moves up", "a green triangle moves down"]


PRESETS = Path(__file__).parents[2] / "configs" / "opensora_v2" / "inference"


def launch(num_ranks: int, source: Path, prompts: Path, target: Path, *flags: str) -> str:
    words = ("generate", source, "--prompts", prompts, "--save-dir", target, *flags)
    code, out, error = finish(start(*words, processes=num_ranks if num_ranks > 1 else 0))
    assert code == 0, error
    return out


@pytest.mark.slow
def test_the_number_of_processes_does_not_change_a_video(run: Outcome, tmp_path: Path):
    prompts = tmp_path / "p.csv"
    prompts.write_text("name,text\n" + "".join(f"same,{text}\n" for text in PROMPTS))
    for ranks in (1, 2):
        said = launch(ranks, run.folder, prompts, tmp_path / f"by{ranks}", "--grid")
        assert said.count("3 videos in") == 1  # rank 0 speaks, the other is silent
    assert len(compared(tmp_path, "video_32px")) == 7  # three videos, three prompts, one sheet


@pytest.mark.slow
def test_known_frames_do_not_depend_on_the_number_of_processes(tmp_path: Path):
    """Of two, both make the one image together, and each two videos alone."""
    write_image(tmp_path / "a.png", np.random.default_rng(0).integers(0, 256, (40, 64, 3), np.uint8))
    prompts = tmp_path / "p.csv"
    prompts.write_text("text,ref\nrain,a.png\nsea,\nwind,a.png\nsun,a.png\n")
    flags = ("--tiny", "--num-frames", "5", "--num-steps", "2", "--dtype", "fp32")
    for ranks in (1, 2):
        known = ("--cond-type", "i2v_loop", "--sampling-option.guidance-batch", "False")
        said = launch(ranks, PRESETS / "256px.py", prompts, tmp_path / f"by{ranks}", *flags, *known)
        assert said.count("1 of them without a ref, made as t2v") == 1
        said = launch(ranks, PRESETS / "t2i2v_256px.py", prompts, tmp_path / f"by{ranks}", *flags)
        assert said.count("1 image in") == 1
    for folder, count in (("video_32px", 16), ("generated_condition", 2)):
        assert len(compared(tmp_path, folder)) == count


def compared(folder: Path, kind: str) -> list[Path]:
    """The files that one process made; those of two are the same."""
    alone, shared = (sorted((folder / f"by{ranks}" / kind).iterdir()) for ranks in (1, 2))
    assert [path.name for path in alone] == [path.name for path in shared]
    for a, b in zip(alone, shared, strict=True):
        if a.suffix == ".mp4":  # H.264 makes several levels of a pixel that was rounded up instead of down
            assert within(np.abs(read_video(a).astype(int) - read_video(b)).mean(), 0.2)
        elif a.suffix == ".png" and kind == "generated_condition":
            assert within(np.abs(read_video(a).astype(int) - read_video(b)).max(), 2)
        elif a.suffix == ".txt":
            assert a.read_text() == b.read_text()
    return alone
