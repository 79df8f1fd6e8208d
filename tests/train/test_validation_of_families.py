"""Validations of the families beside MMDiT, in one process and in two that share the weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from longtake.data.clips.video import write_image
from longtake.data.probing.probe import probe_table
from longtake.data.stories import make_stories
from longtake.presets import find_preset
from tests.precision import within
from tests.train.runs import finish, start, train_here
from tests.train.test_validation import losses, made

PROMPTS = ["a red circle moves left", "a blue square moves up", "a green triangle moves down"]
STORIES = [f'["{prompt}", "then it is gone", "then it moves up"]' for prompt in PROMPTS]
SMALL = {  # of each family's demo
    "opensora_v1_2": {"model.hidden_size": 32, "model.num_heads": 2, "model.depth": 1},
    "cogvideox_fun": {"model.num_layers": 1, "model.num_attention_heads": 1},
    "ttt_video": {"model.num_layers": 1, "model.num_attention_heads": 1, "stage": "story"},
}
ADAPTERS = {"lora": {"rank": 2}, "ema_decay": None, "optim.lr": 0.1, "model.init": "torch"}
COUNTED = """
import os, sys, torch
from longtake.cli import main
from longtake.models import cogvideox, stdit3, ttt_video

models = (cogvideox.CogVideoX, stdit3.STDiT3, ttt_video.TTTVideo)
count = [0]
hook = lambda module, given: count.__setitem__(0, count[0] + isinstance(module, models))
torch.nn.modules.module.register_module_forward_pre_hook(hook)
try:
    main(sys.argv[1:])
finally:
    print("forwards", count[0], file=open({file!r} + os.environ["RANK"], "w"))
"""


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("cogvideox_fun", ADAPTERS),
        *(pytest.param(name, {}, marks=pytest.mark.slow) for name in SMALL),
    ],
    ids=str,
)
def test_every_family_validates_at_step_0_and_at_fixed_steps_alike_in_one_process_and_two(
    clips: Path, tmp_path: Path, name: str, more: dict
) -> None:
    told = name == "ttt_video"
    if told:
        clips = tmp_path / "stories.parquet"
        probe_table(make_stories(tmp_path, 3, num_clips=16), clips)
    write_image(tmp_path / "start.png", np.full((32, 32, 3), 200, np.uint8))
    flags = {
        "dataset.data_path": clips,
        "outputs": tmp_path,
        **{"device": "cpu", "dtype": "fp32", "num_workers": 0, "max_steps": 2, "tensorboard": False},
        **{"warmup_steps": 0, "sampling_option.num_steps": 2, "validate_every": 1},
        "validation.prompts": STORIES if told else PROMPTS,
        **({} if told else {"validation.references": ["", str(tmp_path / "start.png"), ""]}),
        **({"validation.cond_type": "0"} if name == "opensora_v1_2" else {}),
        **{"validation.heldout": 0.35, "validation.levels": [0.2, 0.8], "validation.ema": "both"},
        **SMALL[name],
        **more,
    }
    run = find_preset(f"demo/{name}")
    words = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
    alone, _ = train_here(run, *words, "--exp_name", "alone")
    program = tmp_path / "counted.py"
    program.write_text(COUNTED.format(file=str(tmp_path / "rank")))
    two = alone.folder / "config.py", "--exp_name", "two", "--parallel.zero", "3"
    code, _, error = finish(start("train", *two, processes=2, program=(str(program),)))
    assert code == 0, error
    first, second = ((tmp_path / f"rank{rank}").read_text() for rank in (0, 1))
    assert first == second  # forwards, of one batch of clips and three videos

    ours, theirs = losses(alone.folder), losses(tmp_path / "two")
    kinds = ["raw"] if more else ["raw", "ema"]
    assert list(ours) == list(theirs) == [(step, kind) for step in (0, 1, 2) for kind in kinds]
    assert ours[2, "raw"]["loss"] != ours[0, "raw"]["loss"]
    for moment, line in ours.items():
        assert theirs[moment]["clips"] == line["clips"]
        assert theirs[moment]["loss"] == pytest.approx(line["loss"], rel=1e-3)
    for step, videos in made(alone.folder).items():
        assert list(videos) == [f"prompt_{number:04d}" for number in range(3)]
        for prompt, frames in videos.items():
            same = made(tmp_path / "two")[step][prompt]
            assert within(np.abs(frames.astype(float) - same).mean(), 2)
            given = abs(frames[0].mean() - 200) < 10
            assert given == (prompt == "prompt_0001" and not told)
