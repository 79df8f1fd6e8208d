"""Videos around given pixels: CogVideoX-Fun's own runs repeated from its files, lists of pictures, chains of clips."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from longtake.contracts import LatentShape
from longtake.data.clips.transforms import to_unit
from longtake.diffusion.config import VPredictionConfig
from longtake.diffusion.known import Refs
from longtake.diffusion.v_prediction import VPrediction
from longtake.encoders.autoencoder import Autoencoder
from longtake.families.cogvideox_known import MaskedVideo
from longtake.generate import checks
from longtake.generate import requests as asking
from longtake.generate import sample as sampling
from longtake.generate.config import GenerateConfig
from longtake.generate.prompts import Prompt
from longtake.generate.references import known_pixels
from longtake.generate.requests import Video
from longtake.generate.sample import Request, joined, sample_chains
from longtake.parallel.mesh import Mesh
from longtake.parallel.world import World
from longtake.system.build import System
from longtake.system.encoders import Encoders
from tests.families.test_cogvideox_masks import CAUSAL, MODEL, StandIn
from tests.models.golden_cogvideox import FOLDER, golden_config, golden_model

SHAPE = (5, 16, 48)


class Stub(StandIn, Autoencoder):
    """The golden data's autoencoder, whose decoder gives latents back as they are."""

    is_random, latent = False, CAUSAL

    def check(self, num_frames: int, height: int, width: int) -> None:
        """Takes any shape."""

    def decode(self, latents: Tensor, num_frames: int) -> Tensor:
        return latents


class Table:
    """What the reference fed: the prompt's embeddings, and those of an empty one."""

    max_length = 10

    def __init__(self, golden: dict[str, Tensor]) -> None:
        self.golden = golden

    def embed(self, texts: Sequence[str]) -> Tensor:
        names = ("prompt_embeds" if text else "negative_prompt_embeds" for text in texts)
        return torch.cat([self.golden[name].float() for name in names])


def config_of(cond_type: str, **changes: Any) -> GenerateConfig:
    return GenerateConfig(
        model=golden_config("fun_inp_5b"),
        ae={"type": "cogvideox_vae", "scale_factor": 0.7},
        t5={"type": "words", "dim": 24, "max_length": 10},
        sampling_option={"num_frames": 5, "num_steps": 6, "guidance": 4.5},
        cond_type=cond_type,
        fps_save=8,
        **changes,
    )


def build(golden: dict[str, Tensor], config: GenerateConfig, world: World) -> System:
    autoencoder = Stub(golden["vae.matrix"].float(), golden["vae.offset"].float(), 0.7)
    encoders = Encoders(torch.device("cpu"), autoencoder, config.family.texts, {"text": Table(golden)})
    return System(
        config=config,
        mesh=Mesh.create(config.parallel, world),
        device=torch.device("cpu"),
        dtype=torch.float32,
        denoiser=golden_model("fun_inp_5b"),
        encoders=encoders,
        facts=encoders.facts,
        objective=VPrediction(VPredictionConfig(), patch_size=2),
        law=config.known_law,
    )


@pytest.mark.parametrize(("run", "kind"), [("start", "i2v_head"), ("start_end", "i2v_loop")])
def test_a_video_from_pictures_is_the_published_one(
    run: str, kind: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    golden, config = load_file(FOLDER / "sampling" / f"fun_inpaint_{run}.safetensors"), config_of(kind)
    system = build(golden, config, world)
    for module, name in ((asking, "shape_of"), (sampling, "pixel_shape")):
        monkeypatch.setattr(module, name, lambda *_: SHAPE)
    noise = golden["initial_latents"].float().transpose(1, 2)[0]
    monkeypatch.setattr(sampling, "seeded_noise", lambda seed, shape: noise)
    files = [str(tmp_path / f"{name}.png") for name in ("start_image", "end_image") if name in golden]
    for file in files:
        Image.fromarray(golden[Path(file).stem].numpy()).save(file)
    video = Video(Prompt("a sea", "x"), 0, tmp_path / "x.mp4", tuple(files))
    (request,) = asking.clips_of(video, config)
    assert torch.equal(request.places.mask[0], golden["mask_video"][0, 0] == 255)
    known = sampling.known_of_requests(system, [request], SHAPE, noise[None])
    seen = system.known_conditions(known)["visual"].transpose(1, 2)
    torch.testing.assert_close(seen, golden["inpaint_latents"].float()[:1], rtol=0, atol=1e-5)
    (latents,) = sample_chains(system, [[request]], config.sampling_option)
    torch.testing.assert_close(latents.transpose(0, 1), golden["latents"][-1, 0].float(), rtol=0, atol=2e-4)


LISTS = {"start1": ("i2v_head", (0,)), "start2": ("i2v_head", (0, 1))}
LISTS |= {"start1_end1": ("i2v_loop", (0, 3)), "start2_end1": ("i2v_loop", (0, 1, 3))}


@pytest.mark.parametrize("name", LISTS)
def test_lists_of_pictures_stand_where_they_stood_in_the_published_program(name: str, tmp_path: Path) -> None:
    golden = load_file(FOLDER / "inpaint" / "images_to_video.safetensors")
    kind, numbers = LISTS[name]
    config, files = config_of(kind), [str(tmp_path / f"{number}.png") for number in numbers]
    for file, number in zip(files, numbers, strict=True):
        Image.fromarray(golden["images"][number].numpy()).save(file)
    law, shape = config.law_of_family, (5, 8, 12)
    places = law.given(kind, config.ae.latent, shape, refs=Refs((1.0,) * len(files)))
    (pixels,) = known_pixels(files, places.windows, shape[1:], config)
    mask = golden[f"{name}.mask"][0] == 255
    assert torch.equal(places.mask, mask)
    given = ~mask.expand(3, -1, -1, -1)
    assert torch.equal(pixels[given], golden[f"{name}.video_u8"][0][given])


def test_a_chain_fades_the_frames_that_two_clips_have(monkeypatch: pytest.MonkeyPatch) -> None:
    latent, law = LatentShape(3, 1, 1, causal=False), MaskedVideo(MODEL)
    videos = iter(torch.rand(2, 1, 3, 8, 4, 4) * 2 - 1)
    seen: list[Request] = []

    def made(system: Any, requests: Sequence[Request], *_: Any) -> Tensor:
        seen.extend(requests)
        return next(videos)

    first, second = (one[0] for one in list(torch.stack(list(videos)).clone()))
    videos = iter((first[None], second[None]))
    monkeypatch.setattr(sampling, "sample_videos", made)
    after = Request("on", 2, places=law.given("inpaint_head", latent, (8, 4, 4)))
    (whole,) = sample_chains(SimpleNamespace(latent=latent), [[Request("a sea", 1), after]], None)
    assert whole.shape[1] == 8 + 8 - 4
    for place, share in enumerate((0.0, 0.25, 0.5, 0.75)):
        expected = first[:, 4 + place] * (1 - share) + second[:, place] * share
        torch.testing.assert_close(whole[:, 4 + place], expected)
    assert torch.equal(whole[:, 8:], second[:, 4:])
    (pixels,) = seen[1].known
    torch.testing.assert_close(to_unit(pixels)[:, :4], first[:, 4:], rtol=0, atol=1 / 127)
    exact = replace(after.places.windows[0], shown=None, frames=range(4))
    assert torch.equal(joined(first, second, [exact], latent), torch.cat([first, second[:, 4:]], 1)), "held frames"


def test_what_a_kind_wants_is_said_before_anything_is_built(tmp_path: Path) -> None:
    Image.fromarray(np.zeros((16, 48, 3), np.uint8)).save(tmp_path / "a.png")
    still = str(tmp_path / "a.png")
    for kind, prompt, sentence in (
        ("inpaint", Prompt("x", "x", refs=(still,)), "there is no mask"),
        ("i2v_head", Prompt("x", "x", refs=(still,), mask=still), 'takes none (cond_type = "inpaint" does)'),
        ("i2v_head", Prompt("x", "x", refs=(still,) * 5), "5 references leave no frame of 5 to be made"),
        ("i2v_tail", Prompt("x", "x", refs=(still,) * 2, then=(Prompt("y", "y", carries="inpaint"),)), "wants a mask"),
    ):
        faults = [fault for _, fault in checks.clip_faults(prompt, config_of(kind))]
        assert len(faults) == 1
        assert sentence in faults[0]
    good = Prompt("x", "x", refs=(still,), mask=still)
    assert not list(checks.clip_faults(good, config_of("inpaint")))


def test_a_prompt_makes_a_chain_of_clips_with_noise_of_their_own(tmp_path: Path) -> None:
    Image.fromarray(np.zeros((16, 48, 3), np.uint8)).save(tmp_path / "a.png")
    config = config_of("i2v_head", prompt="x", ref=str(tmp_path / "a.png"), num_clips=3, carries="inpaint_head")
    (prompt,) = asking.prompts_of(config)
    assert [clip.carries for clip in prompt.clips] == [None, "inpaint_head", "inpaint_head"]
    found = asking.clips_of(Video(prompt, 7, tmp_path / "x.mp4", prompt.refs), config)
    assert len({request.seed for request in found}) == 3
    assert [request.places.windows[0].shown for request in found] == [(range(1),), (range(4),), (range(4),)]
    assert not list(checks.clip_faults(prompt, config))
    for changes, sentence in (
        ({"num_clips": 2}, "write carries = one of i2v_head, i2v_tail, i2v_loop, v2v_head"),
        ({"carries": "i2v_head"}, "there is one clip"),
    ):
        with pytest.raises(ValueError, match=sentence):
            config_of("t2v", **changes)
