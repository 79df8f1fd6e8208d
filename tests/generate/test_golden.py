"""Whole generations of the reference, repeated by the way that a user's takes: files, prompts, guidance, solver."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from longtake.contracts import Known, LatentShape
from longtake.diffusion.flow import RectifiedFlow
from longtake.diffusion.known import Window, make_known
from longtake.diffusion.windows import EndWindows
from longtake.encoders.autoencoder import Autoencoder
from longtake.generate import sample as sampling
from longtake.generate.config import GenerateConfig
from longtake.generate.prompts import Prompt
from longtake.generate.references import file_of
from longtake.generate.requests import Video
from longtake.generate.run import sample_batch
from longtake.parallel.mesh import Mesh
from longtake.parallel.world import World
from longtake.system.build import System
from longtake.system.encoders import Encoders
from tests.diffusion.golden import read_tensors
from tests.diffusion.test_conditions import stand_in_encode
from tests.diffusion.test_golden_runs import load_model, pack
from tests.models.golden import rounding

SIZES = {(48, 64): ("56px", "4:3"), (96, 128): ("112px", "4:3"), (16, 32): ("23px", "2:1")}  # names of these frames
ELSEWHERE = {"sampling_distill_image": 5e-4}  # `rounding` on another processor
RUNS = (
    "sampling_t2v",
    "sampling_t2v_image",
    "sampling_t2v_flow_shift",
    "sampling_t2v_patch1",
    "sampling_distill_image",
    "sampling_i2v_head",
    "sampling_i2v_head_long",
    "sampling_i2v_tail",
    "sampling_i2v_loop",
    "sampling_v2v_head",
)


class StandIn(Autoencoder):
    """The golden data's autoencoder, whose decoder gives latents back as they are."""

    is_random, latent = False, None

    def __init__(self, latent: LatentShape) -> None:
        self.latent = latent

    def check(self, num_frames: int, height: int, width: int) -> None:
        """Takes any shape."""

    def posterior(self, video: Tensor) -> dict[str, Tensor]:
        """Pixels -> latents."""
        return {"mean": stand_in_encode(video, self.latent.causal)}

    def decode(self, latents: Tensor, num_frames: int) -> Tensor:
        """Latents -> latents."""
        return latents


class Table:
    """The golden data's text encoders: what the reference fed, by the prompt without what is added to it."""

    max_length = 8

    def __init__(self, golden: dict[str, Tensor], info: dict[str, Any], name: str) -> None:
        self.name, prompts = name, info["text"]
        texts = [*prompts, *(info["neg"] or [""] * len(prompts))]
        rows = {text.split(".")[0]: row for row, text in reversed(list(enumerate(texts)))}
        if info["guidance_img"] is None:
            rows = {text.split(".")[0]: row for row, text in enumerate(prompts)} | {"": 0}
        self.rows, self.golden = rows, golden

    def embed(self, texts: Sequence[str]) -> Tensor:
        """The embeddings that are called `name` in the golden data."""
        return torch.stack([self.golden[self.name][self.rows[text.split(".")[0]]] for text in texts])


def read_config(info: dict[str, Any]) -> GenerateConfig:
    option = {k: v for k, v in info["option"].items() if k in ("num_frames", "num_steps", "shift", "method")}
    option |= {k: info["option"][k] for k in ("guidance", "guidance_img", "text_osci", "image_osci")}
    option |= {"scale_temporal_osci": info["option"]["scale_temporal_osci"]}
    resolution, ratio = SIZES[info["height"], info["width"]]
    option |= {"resolution": resolution, "aspect_ratio": ratio, "flow_shift": info["option"].get("flow_shift")}
    channels = info["config"]["in_channels"] // info["config"]["patch_size"] ** 2
    return GenerateConfig(
        model=info["config"],
        ae={"type": "hunyuan_vae", "latent_channels": channels},  # of the stand-in's shape where frames are known
        t5={"type": "words", "dim": 32},
        clip={"type": "words", "dim": 16},
        sampling_option=option,
        ae_spatial_compression=info["ae_spatial_compression"],
        cond_type=info["cond_type"],
        compat="opensora_v2",
        fps_save=24,
        dtype="fp32",
        device="cpu",
    )


def build(golden: dict[str, Tensor], info: dict[str, Any], config: GenerateConfig, world: World) -> System:
    """A system of the golden weights and stand-ins."""
    latent = LatentShape(config.ae.latent_channels, 4, info["stub_spatial"], info["option"]["is_causal_vae"])
    tables = {"text": Table(golden, info, "txt"), "vector": Table(golden, info, "y_vec")}
    encoders = Encoders(torch.device("cpu"), StandIn(latent), config.family.texts, tables)
    return System(
        config=config,
        mesh=Mesh.create(config.parallel, world),
        device=torch.device("cpu"),
        dtype=torch.float32,
        denoiser=load_model(info),
        encoders=encoders,
        facts=encoders.facts,
        objective=RectifiedFlow(config.objective, config.model.patch_size, config.quirks),
        law=None if config.model.refuses_known else EndWindows(),
    )


def write_references(golden: dict[str, Tensor], item: int, folder: Path) -> tuple[str, ...]:
    """The references of a prompt as files: pictures as PNG, clips without loss at 24 frames a second."""
    paths = []
    for key in sorted(key for key in golden if key.startswith(f"ref.{item}.")):
        pixels = golden[key].numpy()
        if pixels.ndim == 3:
            path = folder / f"{key}.png"
            Image.fromarray(pixels).save(path)
        else:
            path = folder / f"{key}.mkv"
            write_lossless(path, pixels.transpose(1, 2, 3, 0))
        paths.append(str(path))
    return tuple(paths)


def write_lossless(path: Path, frames: np.ndarray) -> None:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("ffv1", rate=24)
        stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], "bgr0"
        for pixels in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), "rgb24")))
        container.mux(stream.encode())


@pytest.fixture
def unlaid(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Latents as the solver left them, before known ones are put over them; and the condition they came from."""
    seen: list[Tensor] = []
    lay = sampling.with_held

    def record(latents: Tensor, known: Known) -> Tensor:
        seen.extend((latents, EndWindows().conditions(known)["visual"]))
        return lay(latents, known)

    monkeypatch.setattr(sampling, "with_held", record)
    return seen


@pytest.mark.parametrize("run", RUNS)
def test_a_generation_equals_the_reference(
    run: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unlaid: list[Tensor]
) -> None:
    golden, info = read_tensors(run)
    tolerance = rounding(ELSEWHERE.get(run, 2e-4)) * golden["tokens"].abs().max().item()
    config, close = read_config(info), {"rtol": 0, "atol": tolerance}
    monkeypatch.setattr(sampling, "seeded_noise", lambda seed, shape: golden["noise"][seed].reshape(shape))
    negatives = info["neg"] or [""] * len(info["text"])
    videos = [
        Video(Prompt(text, "x", negative or None), i, tmp_path / "x.mp4", write_references(golden, i, tmp_path))
        for i, (text, negative) in enumerate(zip(info["text"], negatives, strict=True))
    ]
    latents = sample_batch(build(golden, info, config, world), videos, config)
    if config.kind == "t2v":
        torch.testing.assert_close(latents, golden["latents"], **close)
        return
    sampled, visual = unlaid
    torch.testing.assert_close(visual[:, :1], golden["masks"], rtol=0, atol=0)
    torch.testing.assert_close(visual[:, 1:], golden["masked_ref"], rtol=0, atol=1e-5)
    torch.testing.assert_close(pack(sampled, config.model.patch_size), golden["tokens"], **close)
    # The reference puts known latents over the first video of a batch only, and those of v2v over none.
    expected = torch.where(golden["masks"] > 0, golden["masked_ref"], golden["latents"])
    torch.testing.assert_close(latents, expected, **close)


def test_conditions_of_every_kind_are_the_references() -> None:
    golden, info = read_tensors("inference_conditions")
    for tag, case in info["cases"].items():
        latent = LatentShape(2, 4, 8, case["causal"])
        frames = (info["latent_frames"] - 1) * 4 + 1 if case["causal"] else info["latent_frames"] * 4
        law, kind = EndWindows(), case["kind"]

        def encode(rows: Sequence[int], window: Window, case: dict[str, Any] = case) -> Tensor:
            count = len(window.frames)
            found = [golden[f"ref.{file_of(window, case['refs'][row])}"] for row in rows]
            return torch.stack([one[:, :count] if window.is_head else one[:, -count:] for one in found])

        shape = frames, 16, 16
        given = [law.given(kind if refs else "t2v", latent, shape) for refs in case["refs"]]
        x = torch.zeros(2, 2, info["latent_frames"], 2, 2)
        visual = law.conditions(make_known(given, x, shape, encode, own=False))["visual"]
        torch.testing.assert_close(visual[:, :1], golden[f"{tag}.masks"], rtol=0, atol=0, msg=tag)
        torch.testing.assert_close(visual[:, 1:], golden[f"{tag}.masked_ref"], rtol=0, atol=0, msg=tag)
