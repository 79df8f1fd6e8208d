"""The demos of systems beside the usual one: given frames, a held-back colour, stories."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from longtake.data.tables.table import ClipTable
from longtake.demo.extras import draw_given
from longtake.demo.judge import judge
from longtake.demo.start import run_demo
from longtake.demo.stories import StoryDemo
from longtake.demo.systems import demo_system, given_frames, kinds, looks
from longtake.generate.config import GenerateConfig
from longtake.generate.requests import clips_of, plan_videos
from longtake.system.config import SamplingOption
from longtake.track.progress import make_console
from longtake.train.run_file import read_run


def test_a_colour_that_is_held_back_is_in_no_prompt_of_the_run() -> None:
    system = demo_system("cogvideox_fun")
    config = read_run(str(system.run)).value
    main, heldout = kinds(config, system.held_back)
    assert (len(main.prompts), len(heldout.prompts)) == (50, 10)
    assert not any(system.held_back in prompt for kind in (main, heldout) for prompt in kind.prompts)
    assert main.title == "Main bucket: 16 x 16, 4 frames"
    assert demo_system("shapes").held_back is None


def test_given_frames_are_those_that_a_family_can_be_asked_for() -> None:
    names = {
        name: [given.name for given in given_frames(read_run(str(demo_system(name).run)).value)]
        for name in ("shapes", "cogvideox_fun", "opensora_v1_2")
    }
    assert names == {
        "shapes": [],
        "cogvideox_fun": ["from_stills"],
        "opensora_v1_2": ["from_stills", "between_stills", "from_clips"],
    }


def test_what_is_given_lies_where_a_strategy_takes_it(tmp_path: Path) -> None:
    run = read_run(str(demo_system("opensora_v1_2").run)).value
    option = SamplingOption(**run.sampling_option.model_dump(exclude_none=True))
    own = {name: getattr(run, name) for name in ("model", "ae", "t5", "objective", "fps_save")}
    config = GenerateConfig(**own, sampling_option=option, prompt=["a"])
    frames, prompt = option.num_frames, "a red circle moves right"
    way = []
    for given in given_frames(run):
        table = draw_given(tmp_path / given.name, [prompt], given, run, looks(run))
        asked = config.model_copy(
            update={"cond_type": given.cond_type, "prompts": str(table), "prompt": None, "save_dir": str(tmp_path)}
        )
        (video,) = plan_videos(asked)
        (request,) = clips_of(video, asked)
        taken = [frame for window in request.places.windows for frame in window.frames]
        assert [frame for frame in range(frames) if frame not in taken] == list(range(frames))[slice(*given.made)]
        known = torch.cat([one.movedim(0, -1) for one in request.known]).numpy()
        way.append(judge(known).right)
    assert way[0] == 0
    assert way[1] > way[2] > 0


@pytest.mark.slow
def test_the_demo_of_cogvideox_fun_in_short(tmp_path: Path) -> None:
    """A few steps: all of its parts run. What it learns `benchmarks/demo.py` measures."""
    words = ["--max-steps", "40", "--warmup-steps", "10", "--sampling_option.num_steps", "4", "--device", "cpu"]
    small = {"num_clips": 120, "system": "cogvideox_fun", "of_adapters": ["--max-steps", "3"]}
    outcome = run_demo(tmp_path / "demo", make_console(), words, **small)
    assert len(ClipTable.open(tmp_path / "demo" / "clips" / "seen.parquet")) == 100
    assert {"main", "held_back_before", "from_stills"} <= set(outcome.accuracy)
    assert outcome.checks["given_frame_psnr"] >= 30
    assert outcome.checks["repeated_still_direction"] == 0
    assert outcome.checks["strength_0_is_the_base"]
    page = outcome.report.read_text()
    assert "From a still, main bucket" in page
    assert "adapters at strength 0 are the run without" in page


@pytest.mark.weekly
@pytest.mark.timeout(2400)
def test_the_demo_of_cogvideox_fun_learns_colours_in_a_tenth_of_its_steps(tmp_path: Path) -> None:
    words = ["--max-steps", "320", "--sampling_option.num_steps", "10", "--device", "cpu"]
    small = {"num_clips": 600, "system": "cogvideox_fun", "of_adapters": ["--max-steps", "10"]}
    found = run_demo(tmp_path / "demo", make_console(), words, **small).accuracy
    assert found["main"].colour >= 0.9
    assert found["held_back_before"].colour <= 0.3
    assert found["from_stills"].colour >= 0.9


def interrupted(*arguments: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
def test_the_demo_of_stories_in_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few steps: all of its parts run, and the same call finishes what was interrupted. What it learns
    `benchmarks/demo.py` measures."""
    words = ["--max-steps", "40", "--warmup-steps", "10", "--sampling_option.num_steps", "4", "--device", "cpu"]
    with monkeypatch.context() as patch:
        patch.setattr(StoryDemo, "samples", interrupted)
        assert run_demo(tmp_path / "demo", make_console(), words, num_clips=96, system="ttt_video").stopped
    outcome = run_demo(tmp_path / "demo", make_console(), system="ttt_video")
    assert not list(outcome.folder.glob("*-2"))  # what was done is not done again
    named = {"told": 216, "gone": 96, "gone_back": 32}
    counts = {name: found.count for name, found in outcome.accuracy.items()}
    assert counts == named | {f"without_{name}": count for name, count in named.items()}
    assert set(outcome.checks) == {"gone_back", "without_gone_back"}
    mixers = [read_run(str(outcome.folder / place)).value.model.mixer for place in ("scene", "run", "without/story")]
    assert mixers == ["none", "ttt_linear", "none"]
    starts = [read_run(str(outcome.folder / place)).value.model.from_pretrained for place in ("run", "without/story")]
    assert starts[0] == starts[1] == str(outcome.folder / "scene" / "epoch19-global_step40")
    page = outcome.report.read_text()
    assert "then it is gone; then it moves" in page
    assert "colour of the shape that is back, without a mixer" in page


@pytest.mark.slow
def test_the_demo_of_opensora_v1_2_in_short(tmp_path: Path) -> None:
    """Less than a seventh of its steps: enough for colours, and for the way of a first frame. What it learns in all of
    them `benchmarks/demo.py` measures."""
    words = ["--max-steps", "400", "--sampling_option.num_steps", "10", "--device", "cpu"]
    outcome = run_demo(tmp_path / "demo", make_console(), words, num_clips=600, system="opensora_v1_2")
    assert set(outcome.accuracy) == {"main", "heldout", "from_stills", "between_stills", "from_clips"}
    for name, found in outcome.accuracy.items():
        assert found.colour >= 0.8, name
    assert outcome.accuracy["from_stills"].direction >= 0.75
    for name in ("given_frame", "between_stills", "from_clips"):
        assert outcome.checks[f"{name}_psnr"] >= 30
    assert outcome.checks["repeated_still_direction"] == 0
    assert "From a clip, main bucket" in outcome.report.read_text()
