"""Conditions and a whole sampling run of the authors' I2V-A14B code on a golden model; references of other ratios.

`i2v_a14b.safetensors.xz` holds the texts, the condition, every 13th number of the result, and the settings.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load
from torch import Tensor

from longtake.contracts import Conditions, Known, Window
from longtake.data.clips.video import ClipError
from longtake.diffusion.config import ShiftedFlowConfig
from longtake.diffusion.flow_shifted import ShiftedFlow
from longtake.diffusion.guidance import NEGATIVE, PROMPT, GuidanceScales, Guided
from longtake.diffusion.known import make_known
from longtake.encoders.autoencoder_config import PixelConfig
from longtake.encoders.wan_config import WanVAEConfig
from longtake.families.wan_known import GREY, GreyVideo
from longtake.generate.config import GenerateConfig
from longtake.generate.references import check_crop, reference_faults
from longtake.models.wan_config import WanConfig
from longtake.system.examples import black_out
from tests.models.golden_wan import FOLDER, golden_model

DATA = lzma.decompress((FOLDER / "sampling" / "i2v_a14b.safetensors.xz").read_bytes())
TENSORS = load(DATA)
SETTINGS = json.loads(json.loads(DATA[8 : 8 + int.from_bytes(DATA[:8], "little")])["__metadata__"]["settings"])
MODEL = WanConfig(in_channels=36, out_channels=16)
LAW = GreyVideo(MODEL, WanVAEConfig())
TEXT_ROWS, STRIDE, TOLERANCE = 512, 13, 5e-4  # of golden/wan for whole runs
SHAPE = (SETTINGS["num_frames"], 48, 64)


def golden_known() -> Known:
    """A batch of one clip with its first frame given, whose grey video has the golden latents."""
    condition = TENSORS["condition"]
    places = LAW.given("i2v_head", LAW.ae.latent, SHAPE)

    def encode(rows: Sequence[int], window: Window) -> Tensor:
        assert (list(rows), window.pixels, window.fill) == ([0], range(SHAPE[0]), GREY)
        return condition[:, 4:]

    return make_known([places], torch.zeros_like(condition[:, 4:]), SHAPE, encode)


def test_condition_is_the_golden_mask_and_latents() -> None:
    known = golden_known()
    assert torch.equal(LAW.conditions(known)["visual"], TENSORS["condition"])
    assert not known.held.any()


def test_whole_run_ends_at_the_golden_latents() -> None:
    noise = torch.randn(16, 3, 6, 8, generator=torch.Generator().manual_seed(SETTINGS["noise_seed"]))[None]
    torch.testing.assert_close(noise.flatten()[:3], TENSORS["first_of_noise"])
    model = golden_model("i2v_a14b", text_len=TEXT_ROWS)
    objective = ShiftedFlow(ShiftedFlowConfig(shift=SETTINGS["shift"]), patch_size=2)
    solver = objective.solver("unipc", SETTINGS["steps"])
    grid = objective.solver_grid(solver, SETTINGS["steps"], (16, 3, 6, 8))
    visual = LAW.conditions(golden_known())["visual"]

    def velocity(x: Tensor, t: Tensor, conditions: Conditions) -> Tensor:
        return objective.velocity(
            model(x, t, conditions.updated(visual=visual.expand(len(x), *visual.shape[1:]))), x, t
        )

    def text(name: str) -> Conditions:
        rows = TENSORS[name].float()
        return Conditions(text=torch.nn.functional.pad(rows, (0, 0, 0, TEXT_ROWS - len(rows)))[None])

    branches = {PROMPT: text("positive"), NEGATIVE: text("negative")}
    guided = Guided(velocity, branches, GuidanceScales(SETTINGS["guidance"]), SETTINGS["steps"])
    latents = solver.sample(guided, noise, grid)
    torch.testing.assert_close(latents.flatten()[::STRIDE], TENSORS["final"], rtol=0, atol=TOLERANCE)


def test_pixels_after_the_first_frame_are_grey() -> None:
    places = LAW.given("i2v_head", LAW.ae.latent, SHAPE)
    video = torch.rand(1, 3, *SHAPE) * 2 - 1
    seen = black_out(video.clone(), places.windows[0], [places])
    assert torch.equal(seen[:, :, 0], video[:, :, 0])
    assert not seen[:, :, 1:].any()


def test_sample_without_a_first_frame_sees_zeros() -> None:
    latents = torch.zeros(2, 16, 3, 6, 8)
    given = [LAW.given(kind, LAW.ae.latent, SHAPE) for kind in ("t2v", "i2v_head")]
    known = make_known(given, latents, SHAPE, lambda rows, window: torch.ones(len(rows), 16, 3, 6, 8))
    visual = LAW.conditions(known)["visual"]
    assert not visual[0].any()
    assert visual[1, 4:].all()


@pytest.mark.parametrize("frames", [8, 9])
def test_mask_of_an_autoencoder_of_other_frames_names_the_first_latent_frame(frames: int) -> None:
    law = GreyVideo(MODEL, PixelConfig(temporal=1, spatial=8))
    places = law.given("i2v_head", law.ae.latent, (frames, 16, 16))
    latents = torch.zeros(1, 16, frames, 2, 2)
    visual = law.conditions(make_known([places], latents, (frames, 16, 16), lambda rows, window: latents))["visual"]
    assert visual[:, :4, 0].all()
    assert not visual[:, :4, 1:].any()


def config_at(ratio: str) -> GenerateConfig:
    sampling = {"resolution": "480p", "aspect_ratio": ratio, "num_frames": 9}
    keys = {"in_channels": 36, "type": "wan"}
    prompts = {"prompt": "a pond", "cond_type": "i2v_head"}
    encoders = {"ae": {"type": "wan"}, "t5": {"type": "umt5"}}
    return GenerateConfig(model=keys, sampling_option=sampling, device="cpu", **encoders, **prompts)


def test_image_of_another_ratio_is_refused_and_its_fix_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "square.png"
    Image.fromarray(np.zeros((300, 400, 3), np.uint8)).save(path)
    config = config_at("16:9")
    windows = config.law_of_family.windows("i2v_head", config.ae.latent, 9)
    (fault,) = reference_faults([str(path)], windows, config)
    assert "is 300 x 400" in fault
    assert 'aspect_ratio = "400:300"' in fault
    assert not reference_faults([str(path)], windows, config_at("400:300"))


@pytest.mark.parametrize("size", [(720, 1280), (480, 832), (1080, 1920)])
def test_image_that_the_size_was_rounded_from_is_accepted(size: tuple[int, int]) -> None:
    check_crop(size, config_at("16:9"))
    with pytest.raises(ClipError, match="expected the aspect ratio of the video"):
        check_crop(size, config_at("9:16"))
