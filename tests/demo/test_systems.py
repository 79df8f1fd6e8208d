"""The demo of a system that is given stills and learns a held-back colour by adapters."""

from __future__ import annotations

from pathlib import Path

import pytest

from longtake.data import ClipTable
from longtake.demo import run_demo
from longtake.demo.stories import StoryDemo
from longtake.demo.systems import demo_system, kinds
from longtake.track import make_console
from longtake.train import read_run


def test_a_colour_that_is_held_back_is_in_no_prompt_of_the_run() -> None:
    system = demo_system("cogvideox_fun")
    config = read_run(str(system.run)).value
    main, heldout = kinds(config, system.held_back)
    assert (len(main.prompts), len(heldout.prompts)) == (50, 10)
    assert not any(system.held_back in prompt for kind in (main, heldout) for prompt in kind.prompts)
    assert main.title == "Main bucket: 16 x 16, 4 frames"
    assert demo_system("shapes").held_back is None


@pytest.mark.slow
def test_the_demo_of_cogvideox_fun_in_short(tmp_path: Path) -> None:
    """A tenth of its steps: enough for colours. What it learns in all of them `benchmarks/demo.py` measures."""
    words = ["--max-steps", "320", "--sampling_option.num_steps", "10", "--device", "cpu"]
    small = {"num_clips": 600, "system": "cogvideox_fun", "of_adapters": ["--max-steps", "10"]}
    outcome = run_demo(tmp_path / "demo", make_console(), words, **small)
    captions = ClipTable.open(tmp_path / "demo" / "clips" / "seen.parquet")
    assert len(captions) == 500
    found = outcome.accuracy
    assert found["main"].colour >= 0.9
    assert found["held_back_before"].colour <= 0.3
    assert found["from_stills"].colour >= 0.9
    assert outcome.checks["given_frame_psnr"] >= 30
    assert outcome.checks["repeated_still_direction"] == 0
    assert outcome.checks["strength_0_is_the_base"]
    page = outcome.report.read_text()
    assert "From a still, main bucket" in page
    assert "adapters at strength 0 are the run without" in page


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
