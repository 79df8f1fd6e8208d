"""Generations that are given frames, by the presets at tiny size with random weights and an exact autoencoder."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from longtake.data.clips.transforms import from_unit, resize_crop
from longtake.data.clips.video import write_image, write_video
from longtake.generate import run as running
from longtake.generate.config import GenerateConfig
from longtake.generate.requests import Video
from longtake.generate.run import generate, open_system
from longtake.generate.sample import Request, known_of_requests, pixel_shape, sample_chains, sample_videos
from longtake.generate.source import resolve_source
from longtake.parallel.shard import local_tensor
from longtake.parallel.world import World
from longtake.system.build import System
from longtake.system.config import SamplingOption
from tests.generate.runs import keep_written
from tests.precision import within

PRESETS = Path(__file__).parents[2] / "configs" / "opensora_v2" / "inference"
Make = Callable[..., tuple[list[Video], list[np.ndarray], list[str]]]


def open_tiny(preset: str, world: World, *flags: str) -> System:
    source = resolve_source(str(PRESETS / f"{preset}.py"), ["--tiny", "--dtype", "fp32", "--device", "cpu", *flags])
    system = open_system(source, world, lambda text: None)
    shake(system)
    return system


def shake(system: System) -> None:
    """Random weights everywhere, the entrance for known frames too, which starts at zero."""
    torch.manual_seed(0)
    for parameter in system.denoiser.parameters():
        values = local_tensor(parameter).data
        values += 0.05 * torch.randn(values.shape)


@pytest.fixture(scope="module")
def system(world: World) -> System:
    return open_tiny("256px", world)


@pytest.fixture
def make(system: System, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Generates with flags; the videos, their frames `[T, H, W, 3]` before they are compressed, and what was said."""
    written = keep_written(monkeypatch)

    def make(*flags: str) -> tuple[list[Video], list[np.ndarray], list[str]]:
        said: list[str] = []
        own = ["--tiny", "--dtype", "fp32", "--device", "cpu", "--save-dir", str(tmp_path / "made")]
        config: GenerateConfig = resolve_source(str(PRESETS / "256px.py"), [*own, *flags]).config
        videos = generate(system, config, world, said.append)
        return videos, [written[video.path] for video in videos], said

    return make


def picture(path: Path, seed: int, height: int = 50, width: int = 70) -> str:
    write_image(path, np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))
    return str(path)


def fitted(path: str, frames: np.ndarray) -> np.ndarray:
    """A picture as the model is given it: `[H, W, 3]`."""
    pixels = running.read_image(path)
    return resize_crop(pixels, frames.shape[1:3], still=True)[:, 0].permute(1, 2, 0).numpy()


def test_rows_of_other_kinds_change_no_video_of_a_batch(make: Make, tmp_path: Path) -> None:
    """Guidance that grows over the frames is for a known still: a row with a clip beside it keeps its own."""
    clip = np.random.default_rng(2).integers(0, 256, (72, 50, 70, 3), np.uint8)
    write_video(tmp_path / "v.mp4", clip, 24)
    (tmp_path / "p.csv").write_text(
        f"text,ref,cond_type\nrain,{picture(tmp_path / 'a.png', 1)},i2v_head\nsea,v.mp4,v2v_head\n"
    )
    flags = ("--prompts", str(tmp_path / "p.csv"), "--num-frames", "49", "--num-steps", "2")
    flags += ("--sampling_option.scale_temporal_osci", "True", "--guidance-img", "30")
    alone, together = (make(*flags, "--batch-size", str(size))[1] for size in (1, 2))
    for one, other in zip(alone, together, strict=True):
        assert np.abs(one.astype(int) - other).max() <= 1


@pytest.mark.parametrize(("kind", "known"), [("i2v_head", [0]), ("i2v_tail", [-1]), ("i2v_loop", [0, -1])])
def test_the_given_image_is_the_frame_of_the_video_exactly(make: Make, tmp_path: Path, kind: str, known: list[int]):
    image = picture(tmp_path / "a.png", 1)
    _, (frames,), _ = make("--prompt", "x", "--cond-type", kind, "--ref", image)
    assert frames.shape[0] == 17
    for place in range(17):
        is_given = np.array_equal(frames[place], fitted(image, frames))
        assert is_given == (place in known or place - 17 in known)


def test_every_video_of_a_batch_has_its_own_image(make: Make, tmp_path: Path):
    images = [picture(tmp_path / f"{n}.png", n) for n in range(3)]
    table = tmp_path / "t.csv"
    table.write_text("text,ref\n" + "".join(f"x,{Path(image).name}\n" for image in images))
    _, made, _ = make("--prompts", str(table), "--cond-type", "i2v_head", "--batch-size", "3")
    for image, frames in zip(images, made, strict=True):
        assert np.array_equal(frames[0], fitted(image, frames))


def test_v2v_goes_on_from_the_frames_of_a_video(make: Make, tmp_path: Path):
    clip = np.random.default_rng(0).integers(0, 256, (20, 24, 40, 3), np.uint8)
    write_video(tmp_path / "c.mp4", clip, 24)
    shown = running.read_frames(tmp_path / "c.mp4")
    for kind, given, places in (("v2v_head", shown[:8], slice(0, 8)), ("v2v_tail", shown[-8:], slice(9, 17))):
        _, (frames,), _ = make("--prompt", "x", "--cond-type", kind, "--ref", str(tmp_path / "c.mp4"))
        expected = resize_crop(given, frames.shape[1:3]).permute(1, 2, 3, 0).numpy()
        assert np.array_equal(frames[places], expected)


def test_known_frames_change_the_frames_that_are_made(make: Make, tmp_path: Path):
    one, other = (picture(tmp_path / f"{n}.png", n) for n in range(2))
    flags = ("--prompt", "x", "--cond-type", "i2v_head", "--ref")
    first, second = make(*flags, one)[1][0], make(*flags, other)[1][0]
    assert (first[1:] != second[1:]).any()


def test_a_prompt_without_an_image_is_made_as_t2v_and_counted(make: Make, tmp_path: Path):
    table = tmp_path / "t.csv"
    table.write_text(f"text,ref\na,\nb,{picture(tmp_path / 'a.png', 1)}\nc,\n")
    videos, mixed, said = make("--prompts", str(table), "--cond-type", "i2v_head", "--batch-size", "2")
    assert said == [f"3 videos in {videos[0].path.parent}; 2 of them without a ref, made as t2v"]
    assert [video.prompt.text for video in videos] == ["a", "b", "c"]
    _, plain, said = make("--prompts", str(table))
    assert said[0].endswith('; 1 with a ref that cond_type = "t2v" does not use')
    for number in (0, 2):
        assert np.abs(mixed[number].astype(int) - plain[number]).max() <= 1
    assert (mixed[1] != plain[1]).any()


def branches(system: System, make: Make, *flags: str) -> list[int]:
    """The batch sizes of all calls of the denoiser."""
    sizes: list[int] = []
    hook = system.denoiser.register_forward_pre_hook(lambda module, inputs: sizes.append(len(inputs[0])))
    try:
        make("--prompt", "x", *flags)
    finally:
        hook.remove()
    return sizes


def test_a_step_runs_the_branches_that_it_needs(system: System, make: Make, tmp_path: Path):
    image = ("--cond-type", "i2v_head", "--ref", picture(tmp_path / "a.png", 1))
    steps = ("--num-steps", "14")
    assert branches(system, make, *steps) == [2] * 10 + [2, 1, 2, 1]
    assert branches(system, make, *steps, *image) == [3] * 10 + [3, 1, 3, 1]
    assert branches(system, make, *steps, *image, "--guidance-img", "1") == [2] * 10 + [2, 1, 2, 1]
    held = ("--sampling-option.text-osci", "False")
    assert branches(system, make, *steps, *image, *held) == [3] * 10 + [3, 2, 3, 2]


def test_seed_0_is_a_seed(make: Make):
    flags = ("--prompt", "x", "--seed")
    zero, again, other = (make(*flags, seed) for seed in ("0", "0", "42"))
    assert [found[0][0].seed for found in (zero, again, other)] == [0, 0, 42]
    assert np.array_equal(zero[1][0], again[1][0])
    assert (zero[1][0] != other[1][0]).any()


def test_each_request_draws_its_known_frames_by_its_own_seed(system: System, monkeypatch: pytest.MonkeyPatch):
    plain = type(system.encoders).posterior
    monkeypatch.setattr(
        type(system.encoders), "posterior", lambda self, video: (m := plain(self, video)) | {"std": 0 * m["mean"] + 2}
    )
    shape = 8, 32, 32
    x = torch.zeros(3, *system.autoencoder.latent(8, 32, 32))
    still = torch.zeros(3, 1, 32, 32)
    given = {"places": system.law.given("i2v_head", system.latent, shape), "known": (still,)}
    requests = [Request("", 1), Request("", 2, **given), Request("", 3, **given)]
    together = known_of_requests(system, requests, shape, x).latents
    assert (together[1] != together[2]).any()
    for number in (1, 2):
        alone = known_of_requests(system, [requests[number]], shape, x[:1]).latents
        torch.testing.assert_close(together[number], alone[0], rtol=0, atol=1e-6)


def test_a_slice_of_the_prompts_makes_what_the_whole_makes(make: Make, tmp_path: Path):
    table = tmp_path / "t.csv"
    table.write_text("text\na\nb\nc\nd\n")
    whole = make("--prompts", str(table))
    part = make("--prompts", str(table), "--start-index", "1", "--end-index", "3")
    assert [(v.prompt.text, v.seed) for v in part[0]] == [("b", 43), ("c", 44)]
    assert [v.prompt.name for v in part[0]] == ["t_0001", "t_0002"]
    for number in (0, 1):
        assert np.array_equal(part[1][number], whole[1][number + 1])


def test_names_follow_prefix_and_prompt(make: Make):
    videos, _, _ = make("--prompt", "a b", "--save-prefix", "try_")
    assert videos[0].path.name == "try_prompt_0000.mp4"
    videos, _, _ = make("--prompt", "a/b, c", "--prompt-as-path", "--num-sample", "2")
    assert [video.path.name for video in videos] == ["a_b, c-0.mp4", "a_b, c-1.mp4"]
    (long,), _, _ = make("--prompt", "é" * 300, "--prompt-as-path")
    assert len(long.path.name.encode()) <= 210


def test_the_text_beside_a_video_is_what_the_model_was_told(make: Make):
    (video,), _, _ = make("--prompt", "a sea", "--motion-score", "6")
    assert video.path.with_suffix(".txt").read_text() == "a sea. 24 FPS, 6 motion score.\n"
    (video,), _, _ = make("--prompt", "a sea", "--motion-score", "6", "--compat", "opensora_v2")
    assert video.path.with_suffix(".txt").read_text() == "a sea. 24 FPS. 6 motion score.\n"


def test_t2i2v_goes_on_from_an_image_of_its_own_model_which_is_gone_by_then(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    written = keep_written(monkeypatch)
    alive: list[weakref.ref[object]] = []
    build = running.build_system

    texts: list[object] = [None]

    def watch(*args: object, **options: object) -> System:
        gc.collect()
        assert options["kept"] == texts[-1]
        assert not any(part() is not None for part in alive)
        system = build(*args, **options)
        texts.append(system.encoders.of_captions)
        alive.extend(weakref.ref(part) for part in (system.denoiser, system.autoencoder))
        return system

    monkeypatch.setattr(running, "build_system", watch)
    own = ["--tiny", "--dtype", "fp32", "--device", "cpu", "--save-dir", str(tmp_path)]
    source = resolve_source(str(PRESETS / "t2i2v_256px.py"), [*own, "--prompt", "['a', 'b']"])
    said: list[str] = []
    videos = running.generate_from(source, world, said.append)
    assert len(alive) == 4
    assert said[1::2] == [f"2 images in {tmp_path / 'generated_condition'}", f"2 videos in {tmp_path / 'video_32px'}"]
    for video, frames in zip(videos, written.values(), strict=True):
        (still,) = video.refs
        assert Path(still) == tmp_path / "generated_condition" / f"{video.path.stem}.png"
        assert running.read_image(still).shape[1:3] == (48, 80)  # 64px, the video has 32px
        assert np.array_equal(frames[0], fitted(still, frames))
    assert Path(still).with_suffix(".txt").read_text() == "b.\n"


def option_of(system: System) -> SamplingOption:
    return system.config.sampling_option.model_copy(update={"num_frames": 9, "num_steps": 2, "guidance": 1.0})


def test_each_shot_of_a_chain_begins_where_the_one_before_ends_and_a_loop_closes(system: System) -> None:
    kinds = {"a sea": "t2v", "a storm": "i2v_head", "a shore": "i2v_loop"}
    shape, option = pixel_shape(system, option_of(system)), option_of(system)
    clips = [
        Request(text, 3 + n, places=system.law.given(kind, system.latent, shape))
        for n, (text, kind) in enumerate(kinds.items())
    ]
    done: list[int] = []
    whole, other = sample_chains(
        system, [clips, [replace(clip, seed=9) for clip in clips]], option, lambda *n: done.append(n[:2])
    )
    assert done == [(n, 6) for n in range(1, 7)]
    assert whole.shape[1] == 9 + 8 + 8, "what a clip takes from the one before is shown once"
    (alone,) = sample_videos(system, clips[:1], option)
    torch.testing.assert_close(whole[:, :9], alone, rtol=0, atol=1e-5)
    (second,) = sample_videos(system, [replace(clips[1], known=(from_unit(alone)[:, -1:],))], option)
    torch.testing.assert_close(whole[:, 9:17], second[:, 1:], rtol=0, atol=1e-4)
    torch.testing.assert_close(whole[:, -1], whole[:, 0], rtol=0, atol=2 / 255)  # through bytes
    assert (other - whole).abs().mean() > 0.01


def test_a_clip_that_begins_from_a_video_is_that_video_the_nearer_the_later_it_begins(system: System) -> None:
    option = option_of(system)
    shape = pixel_shape(system, option)
    video = torch.rand(3, *shape, generator=torch.Generator().manual_seed(1)) * 2 - 1

    def distance(start: float) -> float:
        (made,) = sample_videos(system, [Request("a sea", 5, start=start, video=video)], option)
        return float((made - video).abs().mean())

    assert within(distance(0.0), 1e-4)  # but for sigma_min
    assert distance(0.0) < distance(0.3) < distance(0.9)
    (whole,) = sample_videos(system, [Request("a sea", 5)], option)
    (at_once,) = sample_videos(system, [Request("a sea", 5, start=1.0, video=video)], option)
    assert torch.equal(whole, at_once)
