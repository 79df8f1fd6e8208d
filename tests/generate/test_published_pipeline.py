"""A folder that diffusers wrote of a whole CogVideoX pipeline, sampled by us: the videos that diffusers makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longtake.generate import sample as sampling
from longtake.generate.config import GenerateConfig
from longtake.generate.sample import Request, sample_videos, seeded_noise, step_noise
from longtake.parallel.mesh import Mesh
from longtake.parallel.world import start_world
from longtake.system.build import System, build_system
from longtake.system.config import SamplingOption
from tests.encoders.tiny_weights import T5_DIM, _randomise, tiny_t5
from tests.models.golden_cogvideox import FOLDER
from tests.precision import apart, system_in_float64

SHAPE, LENGTH = (9, 64, 64), 226
SIZES = {"num_attention_heads": 2, "attention_head_dim": 16, "out_channels": 4, "time_embed_dim": 16, "num_layers": 1}
SIZES |= {"text_embed_dim": T5_DIM, "max_text_seq_length": LENGTH, "use_rotary_positional_embeddings": True}
SIZES |= {"sample_frames": 9, "sample_height": 8, "sample_width": 8}
SCHEDULER = json.loads((FOLDER / "sampling" / "settings.json").read_text())["diffusers_dpm"]["scheduler_config"]
OPTION = {"resolution": "64px", "aspect_ratio": "1.00", "num_frames": SHAPE[0], "num_steps": 6, "guidance": 5.0}
REQUEST = Request("a red circle moves up", 7, "blue square")


def write_pipeline(folder: Path, kind: str, vae: dict[str, Any], **sizes: Any) -> Any:
    """diffusers' pipeline of random weights, which it has written to `folder`."""
    import diffusers
    from transformers import AutoTokenizer

    transformer = diffusers.CogVideoXTransformer3DModel(**SIZES, **sizes).eval()
    _randomise(transformer, 1)
    parts = {
        "text_encoder": tiny_t5(folder / "t5"),
        "tokenizer": AutoTokenizer.from_pretrained(folder / "t5"),
        "vae": diffusers.AutoencoderKLCogVideoX.from_pretrained(FOLDER / "vae", **vae),
        "transformer": transformer,
        "scheduler": diffusers.CogVideoXDPMScheduler(**SCHEDULER | {"snr_shift_scale": 3.0}),
    }
    pipe = getattr(diffusers, kind)(**parts)
    pipe.save_pretrained(folder / "published")
    pipe.set_progress_bar_config(disable=True)
    return pipe


def ours(folder: Path, **ae: Any) -> System:
    """The system of the folders in one that was published."""
    folders = {name: str(folder / "published" / name) for name in ("transformer", "vae", "text_encoder", "scheduler")}
    t5 = {"type": "text_embedder", "from_pretrained": folders["text_encoder"], "dtype": "fp32"}
    config = GenerateConfig(
        model={"type": "cogvideox", "from_pretrained": folders["transformer"]},
        ae={"type": "cogvideox_vae", "from_pretrained": folders["vae"], "dtype": "fp32", **ae},
        t5={**t5, "dim": T5_DIM, "max_length": LENGTH},
        objective={"type": "v_prediction", "from_pretrained": folders["scheduler"]},
        dtype="fp32",
        device="cpu",
    )
    with start_world("cpu") as world:
        return build_system(config, Mesh.create(config.parallel, world), world)


def theirs(pipe: Any, system: System, **keys: Any) -> Tensor:
    """Its video [3, T, H, W] in [-1, 1] from our noise."""
    if not {"video", "control_video"} & keys.keys():
        noise = seeded_noise(REQUEST.seed, system.latent(*SHAPE))[None].transpose(1, 2)
        keys |= {"latents": noise, "num_frames": SHAPE[0]}
    found = pipe(
        prompt=REQUEST.text,
        negative_prompt=REQUEST.negative,
        height=SHAPE[1],
        width=SHAPE[2],
        num_inference_steps=OPTION["num_steps"],
        guidance_scale=OPTION["guidance"],
        output_type="pt",
        **keys,
    )
    return found.frames[0].transpose(0, 1) * 2 - 1


@pytest.mark.parametrize("solver", ["ddim", "dpmpp_2m_sde"])
def test_text_becomes_the_same_video_alone_and_beside_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, solver: str
) -> None:
    from diffusers import CogVideoXDDIMScheduler
    from diffusers.schedulers import scheduling_dpm_cogvideox as dpm

    pipe, system = write_pipeline(tmp_path, "CogVideoXPipeline", {}, in_channels=4), ours(tmp_path)
    added = step_noise([REQUEST], system.latent(*SHAPE), torch.device("cpu"))
    steps = iter([0, *(step for step in range(1, 6) for _ in range(2))])  # from the second step on it draws twice
    monkeypatch.setattr(dpm, "randn_tensor", lambda *_, **__: added(next(steps)).transpose(1, 2))
    if solver == "ddim":
        pipe.scheduler = CogVideoXDDIMScheduler.from_config(pipe.scheduler.config)
    wanted = theirs(pipe, system, use_dynamic_cfg=True)
    option = SamplingOption(**OPTION, solver=solver, guidance_rule="dynamic")
    video = sample_videos(system, [REQUEST], option)[0]
    assert video.std() > 0.1
    beside = sample_videos(system, [Request("a red square", 3), REQUEST], option)[1]
    with system_in_float64(system):
        exact = sample_videos(system, [REQUEST], option)[0]
    torch.testing.assert_close(video, wanted, rtol=0, atol=5e-4)
    torch.testing.assert_close(beside, video, rtol=0, atol=apart(exact, video))


@pytest.mark.parametrize("inverted", [False, True])
def test_an_image_becomes_the_same_video_in_both_scales_of_known_latents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inverted: bool
) -> None:
    from diffusers import CogVideoXDDIMScheduler
    from diffusers.pipelines.cogvideo import pipeline_cogvideox_image2video as i2v

    sizes = {"in_channels": 8, "use_learned_positional_embeddings": True}
    vae = {"invert_scale_latents": inverted, "scaling_factor": 0.7}
    pipe = write_pipeline(tmp_path, "CogVideoXImageToVideoPipeline", vae, **sizes)
    system = ours(tmp_path, posterior="mode")
    monkeypatch.setattr(i2v, "retrieve_latents", lambda found, *_: found.latent_dist.mode())
    monkeypatch.setattr(sampling, "with_held", lambda latents, known: latents)  # diffusers makes the given frame too
    image = torch.rand(3, *SHAPE[1:], generator=torch.Generator().manual_seed(0))
    pipe.scheduler = CogVideoXDDIMScheduler.from_config(pipe.scheduler.config)
    wanted = theirs(pipe, system, image=image[None])
    places = system.law.given("i2v_head", system.latent, SHAPE)
    request = Request(REQUEST.text, REQUEST.seed, REQUEST.negative, places, (image[:, None] * 2 - 1,))
    option = SamplingOption(**OPTION, solver="ddim")
    video = sample_videos(system, [request], option)[0]
    with system_in_float64(system):
        exact = sample_videos(system, [request], option)[0]
    torch.testing.assert_close(video, wanted, rtol=0, atol=apart(exact, video))


def test_a_video_becomes_the_same_one_under_guidance_that_counts_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers import CogVideoXDDIMScheduler
    from diffusers.pipelines.cogvideo import pipeline_cogvideox_video2video as v2v

    pipe = write_pipeline(tmp_path, "CogVideoXVideoToVideoPipeline", {}, in_channels=4)
    system = ours(tmp_path, posterior="mode")
    pipe.scheduler = CogVideoXDDIMScheduler.from_config(pipe.scheduler.config)
    monkeypatch.setattr(v2v, "retrieve_latents", lambda found, *_: found.latent_dist.mode())
    noise = seeded_noise(REQUEST.seed, system.latent(*SHAPE))[None].transpose(1, 2)
    monkeypatch.setattr(v2v, "randn_tensor", lambda *_, **__: noise)
    video = torch.rand(3, *SHAPE, generator=torch.Generator().manual_seed(0))
    given = video.transpose(0, 1)[None]
    wanted = theirs(pipe, system, video=given, strength=0.5, use_dynamic_cfg=True)
    request = Request(REQUEST.text, REQUEST.seed, REQUEST.negative, start=0.5, video=video * 2 - 1)
    option = SamplingOption(**OPTION, solver="ddim", guidance_rule="dynamic")
    torch.testing.assert_close(sample_videos(system, [request], option)[0], wanted, rtol=0, atol=5e-4)


def test_a_control_video_is_seen_by_its_mean_as_there(tmp_path: Path) -> None:
    from diffusers import CogVideoXDDIMScheduler

    pipe, system = write_pipeline(tmp_path, "CogVideoXFunControlPipeline", {}, in_channels=8), ours(tmp_path)
    pipe.scheduler = CogVideoXDDIMScheduler.from_config(pipe.scheduler.config)
    assert system.config.ae.posterior == "sample"
    control = torch.rand(3, *SHAPE, generator=torch.Generator().manual_seed(0))
    noise = seeded_noise(REQUEST.seed, system.latent(*SHAPE))[None].transpose(1, 2)
    wanted = theirs(pipe, system, control_video=control.transpose(0, 1)[None], latents=noise)
    request = Request(REQUEST.text, REQUEST.seed, REQUEST.negative, companions={"control": control * 2 - 1})
    video = sample_videos(system, [request], SamplingOption(**OPTION, solver="ddim"))[0]
    torch.testing.assert_close(video, wanted, rtol=0, atol=5e-4)
