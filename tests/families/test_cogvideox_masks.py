"""CogVideoX-Fun's masks: as the published program draws them, in its shares, and what becomes of them."""

from __future__ import annotations

import json
import lzma
from collections import Counter
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, load_file
from torch import Tensor

from longtake.contracts import Batch, Bucket, LatentShape
from longtake.diffusion.known import Places, Refs, Window
from longtake.families.cogvideox_known import GENERATION_LEVEL, HIDDEN, MaskedVideo, resized
from longtake.families.cogvideox_masks import MASKS
from longtake.random import OwnNumbers, uniforms
from longtake.system.examples import black_out, known_of_batch
from tests.models.golden_cogvideox import FOLDER

CASES = json.loads((FOLDER / "data" / "masks.json").read_text())["masks"]
MASKS_OF_CASES = load(lzma.decompress((FOLDER / "data" / "masks.safetensors.xz").read_bytes()))
CAUSAL = LatentShape(16, 4, 8, causal=True)
MODEL = SimpleNamespace(visual="inpaint", add_noise_in_inpaint_model=False)
LAW = MaskedVideo(MODEL, SimpleNamespace(scale=0.7, latent=CAUSAL))
FUN = {"inpaint": 1.0}


class Replayed:
    """The numbers that the published program drew, in its order."""

    def __init__(self, draws: Sequence[Any], result: Tensor) -> None:
        self._draws: Iterator[Any] = iter(draws)
        self._result = result

    def integer(self, low: int, high: int) -> int:
        name, arguments, drawn = next(self._draws)
        first, last = arguments[:2]
        assert (low, high) == (first, last + (name == "random.randint"))
        return drawn

    def share(self) -> float:
        return next(self._draws)[2]

    def bits(self, shape: tuple[int, ...]) -> np.ndarray:
        next(self._draws)
        return self._result.bool().numpy().reshape(shape)

    def some(self, count: int, of: int) -> Sequence[int]:
        _, arguments, drawn = next(self._draws)
        assert arguments == [[0, of], count]
        return drawn


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['key']}-{case['kind']}")
def test_a_mask_equals_the_published_one(case: dict[str, Any]) -> None:
    golden = MASKS_OF_CASES[case["key"]][:, 0]
    (_, kinds, drawn), *draws = case["draws"]
    numbers = Replayed(draws, golden)
    frames, _, *sides = case["shape"]
    column = 1 if frames > 1 else 2
    names = list(MASKS)
    assert kinds[0] == [number for number, name in enumerate(names) if MASKS[name][column]]
    mask = MASKS[names[drawn]][0](numbers, (frames, *sides))
    assert torch.equal(torch.from_numpy(mask), golden.bool())
    assert next(numbers._draws, None) is None, "nothing is left undrawn"


@pytest.mark.parametrize("frames", [1, 17])
def test_kinds_are_drawn_in_the_published_shares(frames: int, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: Counter[str] = Counter()
    for kind, (draw, *shares) in list(MASKS.items()):

        def counted(numbers: Any, shape: Any, kind: str = kind, draw: Any = draw) -> np.ndarray:
            drawn[kind] += 1
            return draw(numbers, shape)

        monkeypatch.setitem(MASKS, kind, (counted, *shares))
    count = 4000
    choices = {"mask": uniforms(7, 0, 5, 0, np.arange(count, dtype=np.uint64), 5)}
    found = LAW.drawn(choices, FUN, CAUSAL, (frames, 16, 16))
    hidden = sum(not places.windows for places in found)
    shares = {kind: share for kind, (_, *both) in MASKS.items() if (share := both[frames == 1])}
    assert hidden == pytest.approx(count * shares["inpaint_all"] * HIDDEN, rel=0.1)
    assert drawn["inpaint_all"] == pytest.approx(count * shares["inpaint_all"] * (1 - HIDDEN), rel=0.35)
    for kind in shares.keys() - {"inpaint_all"}:
        assert drawn[kind] == pytest.approx(count * shares[kind], rel=0.25), kind
    again = LAW.drawn({"mask": choices["mask"][100:103]}, FUN, CAUSAL, (frames, 16, 16))
    assert [_bits(one) for one in again] == [_bits(one) for one in found[100:103]], "whatever else is in the batch"


def _bits(places: Places) -> bytes | None:
    return None if places.mask is None else places.mask.numpy().tobytes()


def test_numbers_of_a_sample_spread_over_what_they_are_drawn_from() -> None:
    drawn = [OwnNumbers(key) for key in range(600)]
    assert Counter(one.integer(1, 5) for one in drawn).keys() == {1, 2, 3, 4}
    assert all(sorted(one.some(9, 9)) == list(range(9)) for one in drawn[:20])
    assert np.mean([one.bits((5, 16, 16)) for one in drawn[:20]]) == pytest.approx(0.5, abs=0.01)
    assert len({one.share() for one in drawn}) == 600


def test_kinds_that_do_not_fit_a_clip_leave_the_others() -> None:
    choices = {"mask": np.random.default_rng(0).random((40, 5), np.float32)}
    weights = {"inpaint_ends": 1.0, "v2v_head": 1.0, "inpaint_box": 1.0}
    assert all(not places.mask[:, 0].all() for places in LAW.drawn(choices, weights, CAUSAL, (1, 32, 32)))
    only = LAW.drawn(choices, {"inpaint_ends": 1.0, "v2v_head": 1.0}, CAUSAL, (1, 32, 32))
    assert all(not places.windows for places in only), "a still has neither"
    (first, *_) = LAW.drawn(choices, {"i2v_loop": 1.0}, CAUSAL, (9, 32, 32))
    assert first.mask[0, :, 0, 0].tolist() == [0, *[1] * 7, 0]
    assert any(places.windows for places in LAW.drawn(choices, {"inpaint_ends": 1.0}, CAUSAL, (5, 32, 32)))
    in_one_latent = LatentShape(3, 16, 8, causal=False)
    assert LAW.given("i2v_head", in_one_latent, (16, 8, 8)).mask[0, :, 0, 0].tolist() == [0, *[1] * 15]
    assert LAW.given("i2v_tail", in_one_latent, (16, 8, 8), refs=Refs((1, 1))).mask[0, :, 0, 0].tolist() == [
        *[1] * 14,
        0,
        0,
    ]
    assert not LAW.given("i2v_head", in_one_latent, (1, 8, 8)).windows


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("frames", [1, 2, 3, 5, 9])
def test_what_is_drawn_of_a_kind_is_what_a_store_would_hold(kind: str, frames: int) -> None:
    choices = {"mask": np.random.default_rng(0).random((20, 5), np.float32)}
    names = {window.name for window in LAW.windows(kind, CAUSAL, frames)}
    for places in LAW.drawn(choices, {kind: 1.0}, CAUSAL, (frames, 16, 16)):
        assert {window.name for window in places.windows} <= names


@pytest.mark.parametrize("number", range(3))
def test_a_mask_is_brought_to_the_size_of_the_latents_as_published(number: int) -> None:
    golden = load_file(FOLDER / "inpaint" / "resize_mask.safetensors")
    mask, *outs = (golden[f"resize{number}.{name}"].float() for name in ("mask", "out", "out_all_frames_together"))
    for out, first_alone in zip(outs, (True, False), strict=True):
        found = resized(mask, out.shape[2:], first_alone)
        torch.testing.assert_close(found, out, rtol=0, atol=1e-6)


class StandIn:
    """The autoencoder that the golden conditions were made with."""

    def __init__(self, matrix: Tensor, offset: Tensor, scale: float) -> None:
        self.matrix, self.offset, self.scale = matrix, offset, scale

    def posterior(self, video: Tensor) -> dict[str, Tensor]:
        video = video.float() / 127.5 - 1 if video.dtype == torch.uint8 else video
        cells = torch.nn.functional.avg_pool3d(video, (1, 8, 8))
        frames = [cells[:, :, :1], *(part.mean(2, keepdim=True) for part in cells[:, :, 1:].split(4, 2))]
        latents = torch.einsum("cp,bpfhw->bcfhw", self.matrix, torch.cat(frames, 2))
        return {"mean": (latents + self.offset[:, None, None, None]) * self.scale}


def stand_in(golden: dict[str, Tensor], scale: float) -> Any:
    encoders = StandIn(golden["vae.matrix"].float(), golden["vae.offset"].float(), scale)
    return SimpleNamespace(
        own_encoders=encoders,
        encoders=encoders,
        latent=CAUSAL,
        draw_latents=lambda posterior, normal: posterior["mean"],
    )


@pytest.mark.parametrize("case", json.loads((FOLDER / "inpaint" / "conditions.json").read_text())["cases"], ids=str)
def test_the_condition_equals_the_published_one(case: dict[str, Any]) -> None:
    golden = load_file(FOLDER / "inpaint" / "conditions.safetensors")
    tensors = {name.removeprefix(f"{case['label']}."): value for name, value in golden.items()}
    video = torch.stack([tensors[f"clip{i}"].permute(3, 0, 1, 2) for i in range(2)])
    masks = tensors["mask"].transpose(1, 2).float()
    seen = tensors["t2v_flag"] > 0
    given = [LAW.masked(mask, CAUSAL) if kept else Places() for mask, kept in zip(masks, seen, strict=True)]
    system, shape = stand_in(golden, case["scaling_factor"]), tuple(video.shape[2:])
    sizes = torch.zeros(2), torch.zeros(2, 2), np.zeros(2, np.uint64), torch.ones(2)
    batch = Batch(Bucket("x", 5, "1:1", shape, 2), video, ("", ""), *sizes, {}, known=dict(enumerate(given)))
    latents = system.encoders.posterior(video)["mean"]
    torch.testing.assert_close(latents.transpose(1, 2), tensors["latents"], rtol=0, atol=1e-5)
    known = known_of_batch(system, batch, latents)
    visual = LAW.conditions(known)["visual"].transpose(1, 2)
    torch.testing.assert_close(visual, tensors["inpaint_latents"], rtol=0, atol=1e-5)


def test_without_kinds_a_model_sees_zeros() -> None:
    sizes = torch.zeros(2), torch.zeros(2, 2), np.zeros(2, np.uint64), torch.ones(2)
    video, latents = torch.ones(2, 3, 5, 16, 16), torch.ones(2, 16, 2, 2, 2)
    batch = Batch(Bucket("x", 5, "1:1", (5, 16, 16), 2), video, ("", ""), *sizes, {})
    visual = LAW.conditions(known_of_batch(SimpleNamespace(), batch, latents))["visual"]
    assert visual.shape == (2, 17, 2, 2, 2)
    assert not visual.any()


@pytest.mark.parametrize("case", ["fixed_sigma", "random_sigma"])
def test_noise_on_given_pixels_is_the_published_one(case: str) -> None:
    golden = load_file(FOLDER / "inpaint" / "reference_noise.safetensors")
    video, normal, out = (golden[name].float().transpose(1, 2) for name in ("video", f"{case}.normal", f"{case}.out"))
    if case == "fixed_sigma":
        assert golden["fixed_sigma.sigma"].item() == pytest.approx(GENERATION_LEVEL)
    levels = golden[f"{case}.sigma"].expand(2) if case == "fixed_sigma" else golden[f"{case}.log_sigma"].exp()
    given = [Places(noise=one * level) for one, level in zip(normal, levels, strict=True)]
    every = Window(range(1), range(video.shape[2]), "masked", masked=True)
    torch.testing.assert_close(black_out(video.clone(), every, given), out, rtol=0, atol=1e-5)


def test_noise_on_given_pixels_is_drawn_for_each_sample_at_a_level_of_its_own() -> None:
    law, shape = MaskedVideo(SimpleNamespace(visual="inpaint", add_noise_in_inpaint_model=True)), (5, 16, 16)
    assert law.draws["known_noise"].shape == "pixels"
    count = 300
    numbers = np.random.default_rng(0).random((count, 5), np.float32)
    drawn = law.drawn({"mask": numbers}, {"inpaint_box": 1.0}, CAUSAL, shape)
    found = torch.tensor([places.noise_level for places in drawn]).log()
    assert (found.mean().item(), found.std().item()) == (pytest.approx(-3, abs=0.1), pytest.approx(0.5, abs=0.07))
    assert law.given("i2v_head", CAUSAL, shape).noise_level == GENERATION_LEVEL
