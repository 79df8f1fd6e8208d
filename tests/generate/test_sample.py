from __future__ import annotations

import pytest
import torch

from longtake.contracts import UserError
from longtake.generate.sample import Request, final_prompt, pixel_shape, sample_videos, seeded_noise
from longtake.system.build import System
from longtake.system.config import SamplingOption
from tests.precision import rounding

RED = "a red circle moves left"
BLUE = "a blue square moves up"


def option(**changes: object) -> SamplingOption:
    values = {"resolution": "32px", "aspect_ratio": "1:1", "num_frames": 8, "num_steps": 3, "guidance": 3.0}
    return SamplingOption(**(values | changes))


def calls(system: System, monkeypatch: pytest.MonkeyPatch, **changes: object) -> list[int]:
    """The batch sizes of all calls of the denoiser while two videos are made."""
    sizes: list[int] = []
    hook = system.denoiser.register_forward_pre_hook(lambda module, inputs: sizes.append(len(inputs[0])))
    try:
        sample_videos(system, [Request(RED, 1), Request(BLUE, 2)], option(**changes))
    finally:
        hook.remove()
    return sizes


def test_guidance_runs_prompt_and_negative_as_one_batch(system: System, monkeypatch: pytest.MonkeyPatch):
    assert calls(system, monkeypatch, num_steps=5) == [4] * 5


def test_guidance_of_one_runs_the_prompt_alone(system: System, monkeypatch: pytest.MonkeyPatch):
    assert calls(system, monkeypatch, num_steps=5, guidance=1.0) == [2] * 5


def test_a_video_is_the_same_in_every_batch(system: System):
    alone = sample_videos(system, [Request(RED, 3)], option())
    among = sample_videos(system, [Request(BLUE, 9), Request(RED, 3), Request("", 1)], option())[1:2]
    assert alone.std() > 0.05
    bound = rounding(1.0, steps=3 * system.config.model.hidden_size)  # in each step, sums over channels
    torch.testing.assert_close(among, alone, rtol=0, atol=bound)


@pytest.mark.parametrize("other", [Request(RED, 4), Request(BLUE, 3), Request(RED, 3, BLUE)])
def test_seed_prompt_and_negative_prompt_each_change_the_video(system: System, other: Request):
    video, another = sample_videos(system, [Request(RED, 3), other], option())
    assert (video - another).abs().max() > 0.01


def test_videos_have_the_size_that_was_asked_for(system: System):
    assert sample_videos(system, [Request(RED, 0)], option(aspect_ratio="2:1", num_frames=16)).shape == (
        1,
        3,
        16,
        24,
        40,
    )
    assert sample_videos(system, [Request(RED, 0)], option(num_frames=1)).shape == (1, 3, 1, 32, 32)


def test_every_step_is_announced_in_order(system: System):
    seen: list[tuple[int, int]] = []
    sample_videos(system, [Request(RED, 0)], option(num_steps=4), lambda done, total, x: seen.append((done, total)))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_noise_is_a_function_of_the_seed_alone():
    one = seeded_noise(3, (2, 1, 4, 4))
    assert torch.equal(one, seeded_noise(3, (2, 1, 4, 4)))
    assert not torch.equal(one, seeded_noise(4, (2, 1, 4, 4)))
    assert seeded_noise(0, (8, 4, 16, 16)).std() == pytest.approx(1, abs=0.03)


def test_prompts_get_the_suffix_that_captions_had_in_training(system: System):
    assert final_prompt(system.config, RED, 8) == f"{RED}. 8 FPS."
    assert final_prompt(system.config, "a red circle", 1) == "a red circle."


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_frames": 12}, "ae.temporal = 8: 12 frames do not divide"),
        ({"aspect_ratio": "16to9"}, "'16to9'.*two positive numbers"),
        ({"resolution": "huge"}, "'huge'.*256px"),
    ],
)
def test_a_size_that_cannot_be_made_is_refused(system: System, changes: dict, said: str):
    with pytest.raises(UserError, match=said):
        pixel_shape(system, option(**changes))
