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
from longtake.data import LatentStore, from_unit, read_frames, resize_crop, to_unit, write_image, write_video
from longtake.diffusion import Window
from longtake.generate import Request, check_request, generate, open_system, resolve_source, sample_videos
from longtake.generate import run as running
from longtake.generate.sample import edited, sample_chains, seeded_noise
from longtake.parallel import start_world
from longtake.system import SamplingOption, System, black_out
from longtake.system.examples import make_example
from tests.cli.conftest import longtake
from tests.families.everything_parts import pooled
from tests.families.runs import SIZES, write_family
from tests.families.test_families import everything, registered
from tests.train.conftest import clips
from tests.train.runs import exact, train_here

__all__ = ["clips", "everything", "longtake", "registered"]
SHAPE, LATENT = (17, 32, 32), (3, 5, 4, 4)
OPTION = SamplingOption(resolution="32px", aspect_ratio="1:1", num_frames=17, num_steps=6, guidance=1.0, solver="noisy")


def video_of(seed: int) -> Tensor:
    return torch.randint(0, 256, (3, *SHAPE), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def clean_of(video: Tensor) -> Tensor:
    return pooled(to_unit(video)[None])[0]


def batch_of(video: Tensor, times: list[float], **choices: Any) -> Batch:
    """Samples of one video, at shares of the times."""
    count, ones = len(times), torch.ones(len(times))
    numbers = {name: np.array(values, np.float32) for name, values in choices.items()}
    draws = {"noise": torch.randn(count, *LATENT), "timestep": torch.tensor(times), "dropout": torch.ones(count, 1)}
    bucket = Bucket("32px", 17, "1:1", SHAPE, count)
    texts = (("a sea", "a storm"),) * count
    control = {"control": torch.zeros(count, 3, *SHAPE, dtype=torch.uint8)}
    sizes = torch.zeros(count, 2), np.zeros(count, np.uint64), ones
    return Batch(
        bucket, video.expand(count, *video.shape), texts, ones * 24, *sizes, draws, choices=numbers, companions=control
    )


def test_training_holds_an_edited_place_above_its_share_of_noise_and_makes_it_below(everything: System) -> None:
    times = [0.1, 0.9]
    batch = batch_of(video_of(0), times, mask=[0.5, 0.5], box=[[0.4, 0, 0]] * 2)
    noised, conditions = make_example(everything, batch, everything.embed_nothing(), torch.ones(2), {"edit": 1.0})
    plain, _ = make_example(everything, batch, everything.embed_nothing(), torch.ones(2))
    below, above = plain.t[:, 0].tolist()
    assert below < 400 < above
    assert torch.equal(noised.x[0], plain.x[0])
    assert torch.equal(noised.x[1], clean_of(video_of(0)))
    assert noised.t.tolist() == [[below] * 5, [0] * 5]
    assert noised.counted.flatten(1).all(1).tolist() == [True, False]
    assert conditions["mask"].eq(0.4).all()
    free, held = everything.objective.loss(torch.zeros_like(noised.x), noised).tolist()
    motion = everything.objective.loss(torch.zeros_like(noised.x), replace(noised, counted=torch.zeros(2, 1, 5, 1, 1)))
    assert (free > motion[0], held == motion[1]) == (True, True)


def test_training_masks_pixels_before_they_are_encoded(everything: System) -> None:
    batch = batch_of(video_of(0), [0.5], mask=[0.5], box=[[0, 0.99, 0]])
    noised, conditions = make_example(everything, batch, everything.embed_nothing(), torch.ones(1), {"inpaint": 1.0})
    given = torch.zeros(4, 4, dtype=torch.bool)
    given[2:, :2] = True
    assert torch.equal(conditions["mask"][0, 0] == 0, given.expand(5, 4, 4))
    assert torch.equal(noised.x[0, :, :, given], clean_of(video_of(0))[:, :, given])
    assert noised.t.gt(0).all(), "no whole frame is known"


@pytest.mark.parametrize("kind", ["edit", "box"])
def test_a_place_of_a_video_is_clean_until_it_is_released(everything: System, kind: str) -> None:
    video, seen = video_of(1), []
    hook = everything.denoiser.register_forward_pre_hook(lambda module, args: seen.append(args[:2]))
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
    for step, ((x, t), now) in enumerate(zip(seen[:6], grid, strict=False)):
        if step < released:
            assert torch.equal(x[0][inside], clean[inside])
        elif step == released:
            noised = everything.objective.noised_at(clean, noise, now)
            torch.testing.assert_close(x[0][inside], noised[inside])
        else:
            assert not torch.equal(x[0][inside], clean[inside])
        whole_frames_held = kind == "edit" and step < released
        assert t[0].expand(5).tolist() == [0 if whole_frames_held else now.item()] * 5
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


def files(folder: Path) -> None:
    """A video, a mask whose left half is to be made, and a table of what is asked of them."""
    pixels = video_of(2).permute(1, 2, 3, 0).numpy()
    write_video(folder / "clip.mp4", pixels, 24)
    mask = np.zeros((32, 32, 3), np.uint8)
    mask[:, :16] = 255
    write_image(folder / "mask.png", mask)


def latents_of(frames: np.ndarray) -> Tensor:
    """Of uint8 [T, H, W, 3], without the first, which the autoencoder does not give back."""
    return clean_of(torch.from_numpy(frames).permute(3, 0, 1, 2))[:, 1:]


def made_by(table: str, run: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> list[np.ndarray]:
    files(folder)
    (folder / "t.csv").write_text(table)
    written: list[np.ndarray] = []
    monkeypatch.setattr(running, "write_video", lambda path, frames, fps: written.append(frames))
    size = ("--resolution", "32px", "--aspect-ratio", "1:1", "--num-frames", "17", "--num-steps", "3")
    words = (*words, "--prompts", str(folder / "t.csv"), "--save-dir", str(folder / "made"), *size)
    source = resolve_source(str(run), words)
    with start_world("cpu") as world:
        generate(open_system(source, world), source.config, world)
    return written


@pytest.fixture
def run(clips: Path, tmp_path: Path) -> Path:
    return write_family(tmp_path, clips, "everything")


def test_rows_of_a_table_ask_for_masks_strengths_and_further_clips(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = train_here(run, "--max_steps", "1")[0].folder
    table = "text,ref,mask,strength,edit_ratio,carries\na sea,clip.mp4,mask.png,,,\na storm,,,,0.5,first\n"
    table += "a shore,clip.mp4,,0,,\na lake,clip.mp4,mask.png,,0.9,\n"
    chain, same, edited_late = made_by(table, folder, tmp_path, monkeypatch, "--cond-type", "inpaint")
    given = resize_crop(read_frames(tmp_path / "clip.mp4"), SHAPE[1:]).permute(1, 2, 3, 0).numpy()
    changed = {
        name: (latents_of(frames) - latents_of(given)).abs().amax((0, 1, 2))
        for name, frames in {"same": same, "chain": chain[:17], "late": edited_late}.items()
    }
    assert changed["same"].max() < 1 / 127, "it begins without noise"
    assert changed["chain"][2:].max() < 1 / 127, "the right half is given"
    assert changed["chain"][:2].min() > 0.05
    assert changed["late"].min() > 0.05, "it is made anew from 0.9 on"
    assert len(chain) == 17 + 16
    texts = [path.read_text() for path in (tmp_path / "made").rglob("*.txt")]
    assert sorted(texts) == ["a lake\n", "a sea\na storm\n", "a shore\n"]


@pytest.mark.parametrize(
    ("kind", "row", "said"),
    [
        ("inpaint", "x,clip.mp4,,,,first", "carries stands in row 1, which has no video above it"),
        ("inpaint", "x,clip.mp4,,,,\ny,clip.mp4,,,,first", "ref is given in row 2, which carries on the video above"),
        (
            "inpaint",
            "x,clip.mp4,,,,\ny,,,,,last",
            'carries = "last": choose one of none, box, first, edit, inpaint in row 2',
        ),
        ("inpaint", "x,clip.mp4,,,2,", "edit_ratio in row 1 is '2', no number from 0 to 1"),
        ("inpaint", "x,clip.mp4,none.png,,,", "none.png': "),
        ("edit", "x,clip.mp4,mask.png,,,", 'mask.png\': cond_type = "edit" takes none in row 1'),
        ("none", "x,,,0.5,,", "strength = 0.5: there is no ref to begin from in row 1"),
    ],
)
def test_what_a_row_cannot_have_is_said_before_a_model_is_built(
    run: Path, tmp_path: Path, kind: str, row: str, said: str
) -> None:
    files(tmp_path)
    (tmp_path / "t.csv").write_text(f"text,ref,mask,strength,edit_ratio,carries\n{row}\n")
    parts = "".join(
        f"{key} = {value!r}\n" for key, value in SIZES["everything"].items() if key in ("model", "objective", "ae")
    )
    (tmp_path / "gen.py").write_text(parts + 't5 = dict(type="words", dim=16)\n')
    words = ("--prompts", str(tmp_path / "t.csv"), "--cond-type", kind, "--num-frames", "17")
    with pytest.raises(UserError) as refused:
        check_request(resolve_source(str(tmp_path / "gen.py"), words).config)
    assert said in str(refused.value)


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
