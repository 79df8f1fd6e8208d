"""Known places of the family with everything: released midway, spatial, masked; in training, requests and stores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from longtake.contracts import Batch, Bucket, UserError
from longtake.data.clips.transforms import from_unit, to_unit
from longtake.data.latents.store import LatentStore
from longtake.diffusion.known import Window
from longtake.generate.sample import Request, edited, sample_chains, sample_videos, seeded_noise
from longtake.system.build import System
from longtake.system.config import SamplingOption
from longtake.system.examples import KnownDraw, black_out, clean_example
from tests.cli.conftest import longtake
from tests.families.everything import EVERYTHING, ChunkConfig, Chunks
from tests.families.runs import everything, registered, write_family
from tests.train.conftest import clips
from tests.train.runs import exact, train_here

__all__ = ["clips", "everything", "longtake", "registered"]
SHAPE, LATENT = (17, 32, 32), (3, 5, 4, 4)
OPTION = SamplingOption(resolution="32px", aspect_ratio="1:1", num_frames=17, num_steps=6, guidance=1.0, solver="noisy")


def video_of(seed: int) -> Tensor:
    return torch.randint(0, 256, (3, *SHAPE), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def clean_of(video: Tensor) -> Tensor:
    return Chunks(ChunkConfig()).posterior(to_unit(video)[None])["mean"][0]


def batch_of(video: Tensor, times: list[float], kinds: dict[str, float] | None = None, **choices: Any) -> Batch:
    """Samples of one video, at shares of the times; what is known of them is drawn from `choices` by `kinds`."""
    count, ones = len(times), torch.ones(len(times))
    numbers = {name: np.array(values, np.float32) for name, values in choices.items()}
    draws = {"noise": torch.randn(count, *LATENT), "timestep": torch.tensor(times), "dropout": torch.ones(count, 1)}
    bucket = Bucket("32px", 17, "1:1", SHAPE, count)
    texts = (("a sea", "a storm"),) * count
    control = {"control": torch.zeros(count, 3, *SHAPE, dtype=torch.uint8)}
    sizes = torch.zeros(count, 2), np.zeros(count, np.uint64), ones
    law, latent = EVERYTHING.known_law(None), ChunkConfig().latent
    return Batch(
        bucket,
        video.expand(count, *video.shape),
        texts,
        ones * 24,
        *sizes,
        draws,
        choices=numbers,
        known={} if kinds is None else KnownDraw(law, kinds, latent)(numbers, SHAPE),
        companions=control,
    )


def test_training_holds_an_edited_place_above_its_share_of_noise_and_makes_it_below(everything: System) -> None:
    times = [0.1, 0.9]
    batch = batch_of(video_of(0), times, {"edit": 1.0}, mask=[[0.5, 0.4, 0, 0]] * 2)
    nothing, weights = everything.embed_nothing(), torch.ones(2)
    noised, conditions = clean_example(everything, batch, nothing, weights).noised(everything)
    plain, _ = clean_example(everything, replace(batch, known={}), nothing, weights).noised(everything)
    below, above = plain.t.tolist()
    assert below < 400 < above
    assert torch.equal(noised.x[0], plain.x[0])
    assert torch.equal(noised.x[1], clean_of(video_of(0)))
    assert noised.t.tolist() == [below, above]
    assert conditions["x_mask"].tolist() == [[True] * 5, [False] * 5]
    assert noised.counted.flatten(1).all(1).tolist() == [True, False]
    assert conditions["mask"].eq(0.4).all()
    free, held = everything.objective.loss(torch.zeros_like(noised.x), noised).tolist()
    motion = everything.objective.loss(torch.zeros_like(noised.x), replace(noised, counted=torch.zeros(2, 1, 5, 1, 1)))
    assert (free > motion[0], held == motion[1]) == (True, True)


def test_training_masks_pixels_before_they_are_encoded(everything: System) -> None:
    batch = batch_of(video_of(0), [0.5], {"inpaint": 1.0}, mask=[[0.5, 0, 0.99, 0]])
    example = clean_example(everything, batch, everything.embed_nothing(), torch.ones(1))
    noised, conditions = example.noised(everything)
    given = torch.zeros(4, 4, dtype=torch.bool)
    given[2:, :2] = True
    assert torch.equal(conditions["mask"][0, 0] == 0, given.expand(5, 4, 4))
    assert torch.equal(noised.x[0, :, :, given], clean_of(video_of(0))[:, :, given])
    assert conditions["x_mask"].all(), "no whole frame is known"


@pytest.mark.parametrize("kind", ["edit", "box"])
def test_a_place_of_a_video_is_clean_until_it_is_released(everything: System, kind: str) -> None:
    video, seen = video_of(1), []
    hook = everything.denoiser.register_forward_pre_hook(lambda module, args: seen.append(args))
    places = everything.law.given(kind, everything.latent, SHAPE)
    inside = (places.released < 1).expand(3, 5, 4, 4)
    request = Request("a sea", 1, places=edited(places, 0.4, 5), known=(video,))
    (made,) = sample_videos(everything, [request], OPTION)
    (kept,) = sample_videos(everything, [replace(request, places=places)], OPTION)
    hook.remove()
    clean, grid = clean_of(video), everything.objective.grid(6, LATENT, shape=SHAPE)
    noise = seeded_noise(1, LATENT)
    released = (grid[:-1] > 400).sum().item()
    assert 0 < released < 6
    for step, ((x, t, conditions), now) in enumerate(zip(seen[:6], grid, strict=False)):
        if step < released:
            assert torch.equal(x[0][inside], clean[inside])
        elif step == released:
            noised = everything.objective.noised_at(clean, noise, now)
            torch.testing.assert_close(x[0][inside], noised[inside])
        else:
            assert not torch.equal(x[0][inside], clean[inside])
        whole_frames_held = kind == "edit" and step < released
        assert t[0] == now
        assert conditions["x_mask"][0].tolist() == [not whole_frames_held] * 5
    kept, made = (clean_of(one).where(inside, clean)[:, 1:] for one in (kept, made))  # the first comes back changed
    torch.testing.assert_close(kept, clean[:, 1:])
    assert (made - clean[:, 1:]).abs().mean() > 0.01


def test_noise_is_added_to_the_pixels_that_a_mask_leaves(everything: System) -> None:
    every = everything.law.given("inpaint", everything.latent, SHAPE)
    noisy = replace(every, noise=torch.full((3, *SHAPE), 0.5))
    video = video_of(1).clamp_min(1)[None]
    plain, found = (black_out(video.clone(), every.windows[0], [one]) for one in (every, noisy))
    given = every.mask.expand(1, 3, *SHAPE) == 0
    assert torch.equal(found, torch.where(given, to_unit(video) + 0.5, -1.0))
    assert torch.equal(plain, torch.where(given, to_unit(video), -1.0))


def test_the_next_clip_of_a_loop_takes_latents_of_the_whole_clip_before(everything: System) -> None:
    option = OPTION.model_copy(update={"num_frames": 34})
    after = replace(
        everything.law.given("edit", everything.latent, (34, 32, 32)),
        windows=(Window(range(5), range(34), skip=5),),
        released=None,
    )
    (made,) = sample_chains(everything, [[Request("a sea", 1), Request("a storm", 2, places=after)]], option)
    assert made.shape[1] == 34 + 17, "the 17 frames that both have are shown once"
    (plain,) = sample_videos(everything, [Request("a sea", 1)], option)
    assert torch.equal(made[:, :34], plain)
    before = from_unit(plain)
    (second,) = sample_videos(everything, [Request("a storm", 2, places=after, known=(before,))], option)
    assert torch.equal(made[:, 34:], second[:, 17:])
    torch.testing.assert_close(second[:, 1:17:4, ::8, ::8], clean_of(before)[:, 6:])


@pytest.fixture
def run(clips: Path, tmp_path: Path) -> Path:
    return write_family(tmp_path, clips, "everything")


def test_a_store_holds_clips_as_masks_leave_them_for_these_weights_of_kinds(
    longtake: Any, run: Path, tmp_path: Path
) -> None:
    store, words = tmp_path / "store", ("--dataset.views", "2", "--max_steps", "3")
    kinds = ("--condition_config.none", "0", "--condition_config.box", "0", "--condition_config.edit", "0")
    assert longtake("data", "encode", run, "--dataset.views", 2, *kinds, "-o", store)[0] == 0
    assert dict(LatentStore.open(store).windows(17)) == {"head1": 1, "masked": 5}
    online, _ = train_here(run, "--exp_name", "online", *words, *kinds)
    stored, said = train_here(run, "--exp_name", "stored", *words, *kinds, "--dataset.latents", str(store))
    assert "no encoder is loaded" in said
    assert exact(stored.folder) == exact(online.folder)
    with pytest.raises(UserError, match=r"condition_config.edit is 1.0 here and 0.0 in the store"):
        train_here(run, *words, *kinds[:4], "--dataset.latents", str(store))
