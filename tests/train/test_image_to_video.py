"""The proof of image to video: a tiny model learns to go on from a given frame, and is seen to use it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from longtake.contracts import Batch, Bucket
from longtake.data.clips.video import read_frames, write_image
from longtake.data.probing.probe import probe_table
from longtake.data.shapes import make_shapes
from longtake.data.tables.table import ClipTable
from longtake.generate.run import generate, open_system, read_video
from longtake.generate.source import resolve_source
from longtake.parallel.world import World, start_world
from longtake.system.build import System
from longtake.system.examples import KnownDraw, known_of_batch
from longtake.train.run import Outcome
from tests.train.runs import metrics, train_here, write_config

pytestmark = pytest.mark.slow

KINDS = {"t2v": 1, "i2v_head": 5, "i2v_loop": 1, "i2v_tail": 1}  # those of configs/opensora_v2/train/stage1_i2v.py
WIDTH, FRAMES = 96, 4
RUN = {
    "ae": {"type": "pixel", "temporal": 1, "spatial": 8},  # every frame by itself, so that one can be given
    "t5": {"type": "words", "dim": WIDTH, "max_length": 8},
    "clip": {"type": "words", "dim": WIDTH, "max_length": 8},
    "model": {
        "in_channels": 3 * 8 * 8,
        "patch_size": 1,
        "hidden_size": WIDTH,
        "num_heads": 2,
        "axes_dim": (16, 16, 16),
        "theta": 100,
        "depth": 1,
        "depth_single_blocks": 3,
        "init": "zero_gate",
        "vec_in_dim": WIDTH,
        "context_in_dim": WIDTH,
        "fused_qkv": True,
        "cond_embed": True,
    },
    "bucket_config": {"32px": {FRAMES: (1.0, 16)}},
    "condition_config": KINDS,
    "objective": {"predict": "clean", "shift": None, "timestep_mean": 1.5, "timestep_std": 1.2, "min_t": 0.5},
    "optim": {"lr": 3e-3, "eps": 1e-8, "betas": (0.9, 0.98)},
    "slots_per_step": 1,
    "warmup_steps": 20,
    "ema_decay": 0.98,
    "decay_fraction": 0.4,
    "final_lr_ratio": 0.02,
    "max_steps": 500,
    "epochs": 100,
    "cpu_threads": 1,
    "log_every": 100,
    "fps_save": 8,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The run, over square and wide clips of moving shapes."""
    folder = tmp_path_factory.mktemp("i2v")
    probe_table(make_shapes(folder, num_clips=320, num_stills=0), folder / "clips.parquet")
    dataset = {"data_path": str(folder / "clips.parquet"), "cache_mb": 256}
    config = write_config(folder, folder / "clips.parquet", **RUN, dataset=dataset)
    return train_here(config, "--exp-name", "i2v")[0]


@pytest.fixture(scope="module")
def unseen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tensor, tuple[str, ...]]:
    """16 square clips of other draws: uint8 [16, 3, 8, 32, 32], and their captions."""
    folder = tmp_path_factory.mktemp("unseen")
    probe_table(make_shapes(folder, seed=1, num_clips=48, num_stills=0), folder / "clips.parquet")
    table = ClipTable.open(folder / "clips.parquet")
    rows = [row for row in range(len(table)) if table.height[row] == table.width[row]][:16]
    clips = [read_frames(table.location(row), range(FRAMES)) for row in rows]
    return torch.from_numpy(np.stack(clips)).permute(0, 4, 1, 2, 3).contiguous(), tuple(
        table.caption(row, "text") for row in rows
    )


def error(system: System, clips: tuple[Tensor, tuple[str, ...]], kind: str, other: int = 0) -> float:
    """How far the frames behind the first are from the clips', by the prediction of the clean clip at fixed noise.

    kind: of the known frames. other: each clip is given the frames of the one so many places on.
    """
    video, captions = clips
    count = len(captions)
    ones = torch.ones(count)
    bucket = Bucket("32px", FRAMES, "1:1", (FRAMES, 32, 32), count)
    keys = np.zeros(count, np.uint64)
    batch = Batch(
        bucket, video, captions, ones * 8, torch.zeros(count, 2), keys, ones, {}, choices={"mask": 0.5 + 0 * keys}
    )
    given = replace(batch, video=video.roll(-other, 0))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        latents = system.encode(batch)
        noise = torch.randn(latents.shape, generator=generator)
        noised = system.objective.noise(latents, {"noise": noise, "timestep": ones * 1.5}, ones)
        texts = system.embed([f"{caption}. 8 FPS." for caption in captions])
        drawn = KnownDraw(system.law, {kind: 1}, system.latent)(given.choices, given.bucket.shape)
        known = known_of_batch(system, replace(given, known=drawn), latents)
        conditions = texts.updated(**system.law.conditions(known))
        clean = system.denoiser(noised.x, noised.t, conditions)
    return float((clean - latents)[:, :, 1:].square().mean())


def test_the_loss_falls_and_known_frames_are_what_lowers_it(
    trained: Outcome, unseen: tuple[Tensor, tuple[str, ...]]
) -> None:
    losses = [line["loss"] for line in metrics(trained.folder)]
    with start_world("cpu") as world:
        system = open_system(resolve_source(str(trained.folder), []), world, lambda text: None)
        blank, head, loop = (error(system, unseen, kind) for kind in ("t2v", "i2v_head", "i2v_loop"))
        wrong = error(system, unseen, "i2v_head", other=5)
    assert np.mean(losses[-40:]) < 0.4 * np.mean(losses[:20])
    assert head < 0.4 * blank, "the first frame tells where the shape is and which"
    assert loop < 0.9 * head, "the last one tells where it goes"
    assert wrong > 3 * head, "the first frame of another clip misleads"


def psnr(first: np.ndarray, second: np.ndarray) -> float:
    """Of two pictures uint8 [H, W, 3], dB."""
    return float(10 * np.log10(255**2 / max(1e-9, np.mean((first.astype(float) - second.astype(float)) ** 2))))


def margins(made: list[tuple[np.ndarray, np.ndarray]]) -> list[float]:
    """By how many dB the second frame of each video is nearer to its image than to the nearest of the others.

    Of one video this depends on how alike two images happen to be (dim backgrounds: 21 dB), so only the mean counts.
    """
    images = [image for image, _ in made]
    result = []
    for number, (image, frames) in enumerate(made):
        others = [psnr(frames[1], other) for k, other in enumerate(images) if k != number]
        result.append(psnr(frames[1], image) - max(others))
    return result


def generated(
    run: Path, clips: tuple[Tensor, tuple[str, ...]], folder: Path, count: int, world: World
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(given image, frames [T, H, W, 3]) of videos that `run` makes from the first frames of clips."""
    found = []
    option = {"num_frames": FRAMES, "num_steps": 20, "flow_shift": 3, "guidance": 1, "guidance_img": 1}
    option |= {"resolution": "32px", "aspect_ratio": "1:1"}
    sampling = [word for key, value in option.items() for word in (f"--sampling_option.{key}", str(value))]
    for number, (clip, caption) in enumerate(zip(clips[0][:count], clips[1], strict=False)):
        image = clip[:, 0].permute(1, 2, 0).numpy()
        write_image(folder / f"{number}.png", image)
        flags = ["--cond_type", "i2v_head", "--ref", str(folder / f"{number}.png"), "--prompt", caption]
        source = resolve_source(str(run), [*sampling, *flags, "--save_dir", str(folder / f"made{number}")])
        system = open_system(source, world, lambda text: None)
        (video,) = generate(system, source.config, world, lambda text: None)
        found.append((image, read_video(video.path)))
    return found


def test_a_video_begins_with_the_given_image_and_goes_on_from_it(
    trained: Outcome, unseen: tuple[Tensor, tuple[str, ...]], tmp_path: Path
) -> None:
    with start_world("cpu") as world:
        made = generated(trained.folder, unseen, tmp_path, 4, world)
    assert min(psnr(frames[0], image) for image, frames in made) > 30
    assert np.mean(margins(made)) > 3, "frame 2 is like the given image, not like another"
