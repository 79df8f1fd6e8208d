"""Validations: videos of fixed prompts made while a run trains, which change nothing of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from longtake.cli import main
from longtake.contracts import Conditions
from longtake.data.clips.video import write_image
from longtake.generate.run import generate_from, read_video
from longtake.generate.source import resolve_source
from longtake.parallel.shard import local_tensor
from longtake.parallel.world import start_world
from longtake.system.build import System
from longtake.track.trackers import read_lines
from longtake.train.validating import Validator
from tests.train.runs import (
    assert_one_sentence,
    assert_same_bits,
    exact,
    finish,
    run_command,
    start,
    train_here,
    write_config,
)

PROMPTS = ["a red circle moves left", "a blue square moves up", "a green triangle moves down"]
SAMPLING = {"num_steps": 2, "guidance": 1.5, "resolution": "32px", "num_frames": 8, "aspect_ratio": "1:1"}
VALIDATION = {"prompts": PROMPTS, "sampling_option": SAMPLING}
HELD_OUT = {"heldout": 0.3, "levels": [0.2, 0.8], "ema": "both"}
OF_IMAGES = {  # a model that can be given a frame
    "ae": {"type": "pixel", "temporal": 1, "spatial": 8},
    "model": {
        "in_channels": 192,
        "patch_size": 1,
        "hidden_size": 36,
        "num_heads": 2,
        "axes_dim": (6, 6, 6),
        "depth": 1,
        "depth_single_blocks": 1,
        "vec_in_dim": 16,
        "context_in_dim": 16,
        "fused_qkv": True,
        "cond_embed": True,
    },
    "condition_config": {"t2v": 1, "i2v_head": 2},
}


def made(folder: Path) -> dict[str, dict[str, np.ndarray]]:
    """The videos of a run, by the step and the name."""
    steps = sorted((folder / "validation").iterdir())
    return {step.name: {file.stem: read_video(file) for file in sorted(step.glob("*.mp4"))} for step in steps}


def assert_same_videos(ours: dict[str, dict[str, np.ndarray]], theirs: dict[str, dict[str, np.ndarray]]) -> None:
    assert {step: list(videos) for step, videos in ours.items()} == {step: list(v) for step, v in theirs.items()}
    for step, videos in ours.items():
        for name, frames in videos.items():
            assert np.array_equal(frames, theirs[step][name]), f"{name} of {step}"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, clips: Path) -> Path:
    """The last checkpoint of a run without validations."""
    return train_here(write_config(tmp_path_factory.mktemp("plain"), clips))[0].checkpoint


Held = dict[str, list[tuple[int, int, int]]]  # device bytes of moments, averages and weights, by the moment


@pytest.fixture(scope="module")
def held() -> Held:
    """What the run below has on its device in its validations."""
    return {}


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, clips: Path, held: Held) -> Path:
    """The folder of the same run with validations that offload all they do not need, and a checkpoint at each."""
    folder = tmp_path_factory.mktemp("watched")
    section = {**VALIDATION, "offload": True}
    own = {"validation": section, "validate_every": 3, "ckpt_every": 3, "tensorboard": True}
    with pytest.MonkeyPatch.context() as patch:
        note_bytes(patch, held)
        return train_here(write_config(folder, clips, **own))[0].folder


def note_bytes(patch: pytest.MonkeyPatch, held: Held) -> None:
    """Has validations note what is on the device before them, while text is embedded, in a forward, and after them."""
    make, embed, denoising = Validator._make, System.embed, System.denoising

    def watch(self: Validator, step: int) -> bool:
        def note(moment: str) -> None:
            moments, averages = (of.storage.on_device for of in (self.updates[0].optimizer, self.updates[0].ema))
            sets = moments, averages, list(self.system.denoiser.parameters())
            found = tuple(sum(local_tensor(x).untyped_storage().nbytes() for x in tensors) for tensors in sets)
            held.setdefault(moment, []).append(found)

        def embedding(system: System, texts: list[str]) -> Conditions:
            note("texts")
            return embed(system, texts)

        @contextmanager
        def forwards(system: System) -> Iterator[None]:
            with denoising(system):
                note("forwards")
                yield

        note("before")
        with patch.context() as inner:
            inner.setattr(System, "embed", embedding)
            inner.setattr(System, "denoising", forwards)
            made = make(self, step)
        note("after")
        return made

    patch.setattr(Validator, "_make", watch)


def last(folder: Path) -> Path:
    return max(folder.glob("epoch*-global_step*"), key=lambda path: int(path.name.rpartition("step")[2]))


def test_a_run_with_validations_is_the_run_without(plain: Path, watched: Path) -> None:
    assert exact(watched) == exact(plain.parent)
    assert_same_bits(last(watched), plain)
    videos = made(watched)
    assert list(videos) == ["step000000", "step000003", "step000006"]
    assert all(list(found) == ["prompt_0000", "prompt_0001", "prompt_0002"] for found in videos.values())
    _, first, second = videos.values()
    assert any((first[name] != second[name]).any() for name in first)
    assert (watched / "validation" / "step000003" / "prompt_0001.txt").read_text().startswith(PROMPTS[1])


def test_moments_average_and_resting_weights_leave_the_device_meanwhile(watched: Path, held: Held) -> None:
    (moments, averages, weights), *others = held["before"]
    assert min(moments, averages, weights) > 0
    assert {*others, *held["after"]} == {(moments, averages, weights)}
    assert set(held["texts"]) == {(0, 0, 0)}
    assert set(held["forwards"]) == {(0, 0, weights)}


def test_validations_show_the_averaged_weights_as_generate_does(watched: Path, tmp_path: Path) -> None:
    checkpoint = next(watched.glob("epoch*-global_step6"))
    words = ["--save-dir", str(tmp_path), *(word for prompt in PROMPTS for word in ("--prompt", prompt))]
    words += [word for key, value in SAMPLING.items() for word in (f"--sampling_option.{key}", str(value))]
    with start_world("cpu") as world:
        videos = generate_from(resolve_source(str(checkpoint), words), world, lambda line: None)
    own = made(watched)["step000006"]
    assert all(np.array_equal(read_video(video.path), own[video.prompt.name]) for video in videos)


def test_videos_go_to_tensorboard_with_their_prompts(watched: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (events,) = (watched / "tensorboard").iterdir()
    read = EventAccumulator(str(events), size_guidance={"images": 0})
    read.Reload()
    assert sorted(read.Tags()["images"]) == [f"validation/prompt_000{i}" for i in range(3)]
    shown = read.Images("validation/prompt_0002")
    assert [one.step for one in shown] == [0, 3, 6]
    assert shown[0].encoded_image_string.startswith(b"GIF89a")
    assert read.SummaryMetadata("validation/prompt_0002").summary_description == PROMPTS[2]


def test_a_resumed_run_neither_repeats_nor_skips_a_validation(watched: Path, clips: Path, tmp_path: Path) -> None:
    """Stopped before a validation, at one and behind it."""
    folder = write_config(tmp_path, clips, validation=VALIDATION, validate_every=3)
    for stop, count in ((2, 6), (3, 12), (4, 12), (8, 18)):
        before = {path: path.stat().st_mtime_ns for path in folder.glob("validation/*/*")}
        folder = train_here(folder, "--max-steps", str(stop))[0].folder
        after = {path: path.stat().st_mtime_ns for path in folder.glob("validation/*/*")}
        assert len(after) == count
        assert before.items() <= after.items()
    assert_same_videos(made(folder), made(watched))


@pytest.mark.slow
def test_what_a_killed_launch_left_undone_or_did_too_early_is_put_right(
    watched: Path, clips: Path, tmp_path: Path
) -> None:
    own = {"validation": VALIDATION, "validate_every": 3}
    first, _ = train_here(write_config(tmp_path, clips, **own), "--max-steps", "3")
    shutil.rmtree(first.folder / "validation")  # stopped after the checkpoint of this step, before its videos
    (first.folder / "validation" / "step000004").mkdir(parents=True)  # of a step after the checkpoint
    (first.folder / "validation" / ".step000003.partial").mkdir()
    train_here(first.folder, "--max-steps", "3")  # makes no step, but what is owed
    assert list(made(first.folder)) == ["step000003"]
    train_here(first.folder, "--max-steps", "8")
    later = {step: found for step, found in made(watched).items() if step != "step000000"}
    assert_same_videos(made(first.folder), later)


@pytest.mark.slow
def test_validations_by_passes_come_at_their_ends(clips: Path, tmp_path: Path) -> None:
    own = {"validation": VALIDATION, "validate_every_passes": 2, "max_steps": 13}
    first, _ = train_here(write_config(tmp_path, clips, **own), "--max-steps", "4")
    assert list(made(first.folder)) == ["step000000", "step000004"]
    train_here(first.folder, "--max-steps", "13")
    assert list(made(first.folder)) == [
        "step000000",
        "step000004",
        "step000012",
    ]  # of passes 0, 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        ("--parallel.zero", "2"),
        (),
        ("--parallel.sequence", "2"),
    ],
    ids=str,
)
def test_two_processes_make_each_video_once_and_train_as_without(
    clips: Path, tmp_path: Path, layout: tuple[str, ...]
) -> None:
    image = np.full((1, 32, 32, 3), 200, np.uint8)
    write_image(tmp_path / "start.png", image[0])
    runs = {}
    sampled = {"prompts": PROMPTS, "references": ["", str(tmp_path / "start.png"), ""], "sampling_option": SAMPLING}
    sampled["offload"] = True
    for name, own in (("plain", {}), ("watched", {"validation": sampled, "validate_every": 2})):
        config = write_config(tmp_path / name, clips, **OF_IMAGES, **own)
        code, _, error = finish(start("train", config, "--max-steps", "4", *layout, processes=2))
        assert code == 0, error
        runs[name] = tmp_path / name / "outputs" / "tiny"
    assert exact(runs["watched"]) == exact(runs["plain"])
    assert_same_bits(last(runs["watched"]), last(runs["plain"]))
    videos = made(runs["watched"])
    assert list(videos) == ["step000000", "step000002", "step000004"]
    for found in videos.values():
        assert list(found) == ["prompt_0000", "prompt_0001", "prompt_0002"]
        given = {name: np.abs(frames[0].astype(float) - 200).mean() for name, frames in found.items()}
        assert given["prompt_0001"] < 10 < min(given["prompt_0000"], given["prompt_0002"])


def test_rows_have_lengths_seeds_and_strengths_of_their_own(clips: Path, tmp_path: Path) -> None:
    table = tmp_path / "prompts.csv"
    rows = ["first,a cat,5,,", "again,a cat,5,,", "other,a cat,6,,", "still,a cat,5,1,", "base,a cat,5,,0"]
    table.write_text("name,text,seed,num_frames,lora_strength\n" + "\n".join(rows) + "\n")
    own = {"validation": {**VALIDATION, "prompts": str(table), "ema": False}, "validate_every": 3}
    own |= {"lora": {"rank": 4}, "lr": 0.03, "ema_decay": None}
    folder = train_here(write_config(tmp_path, clips, **own), "--max-steps", "3")[0].folder
    before, after = made(folder).values()
    assert np.array_equal(after["first"], after["again"])
    assert not np.array_equal(after["first"], after["other"])
    assert not np.array_equal(after["first"], before["first"])
    assert np.array_equal(after["base"], before["first"])
    assert (folder / "validation" / "step000003" / "still.png").exists()


def losses(folder: Path) -> dict[tuple[int, str], dict]:
    return {(line["step"], line["weights"]): line for line in read_lines(folder / "validation.jsonl")}


def test_the_loss_of_clips_held_back_moves_with_the_weights_alone(clips: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, clips, validation=HELD_OUT, validate_every=2, lr=1e-15, initial_lr=0.0)
    still, said = train_here(config, "--max-steps", "4", "--exp-name", "still")
    assert " held back for validation" in said
    found = losses(still.folder)
    assert list(found) == [(step, weights) for step in (0, 2, 4) for weights in ("raw", "ema")]
    first, *others = found.values()
    assert first["clips"] == sum(of["clips"] for of in first["buckets"].values()) > 3
    assert set(first["levels"]) == {"0.2", "0.8"}
    for other in others:
        assert other["clips"] == first["clips"]
        assert other["loss"] == pytest.approx(first["loss"], rel=1e-6)
    moved, _ = train_here(config, "--max-steps", "4", "--lr", "3e-3", "--exp-name", "moved")
    assert losses(moved.folder)[0, "raw"] == first
    assert losses(moved.folder)[4, "raw"]["loss"] < 0.999 * losses(moved.folder)[4, "ema"]["loss"] < first["loss"]


@pytest.mark.slow
def test_held_out_tables_leave_the_training_as_it_is(plain: Path, clips: Path, tmp_path: Path) -> None:
    """In two launches, whose curve is that of one; a killed launch's line behind its checkpoint is made anew."""
    section = {"data_path": str(clips), "clips": 12}
    config = write_config(tmp_path, clips, validation=section, validate_every=4)
    whole, _ = train_here(config, "--exp-name", "whole")
    assert exact(whole.folder) == exact(plain.parent)
    parts, _ = train_here(config, "--max-steps", "4", "--exp-name", "parts")
    late = (whole.folder / "validation.jsonl").read_text().splitlines()[-1]
    with (parts.folder / "validation.jsonl").open("a") as file:
        file.write(late + "\n")
    train_here(parts.folder, "--max-steps", "8")
    assert read_lines(parts.folder / "validation.jsonl") == read_lines(whole.folder / "validation.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("layout", [("--parallel.sequence", "2"), ()], ids=str)
def test_the_held_out_loss_does_not_depend_on_the_processes(
    clips: Path, tmp_path: Path, layout: tuple[str, ...]
) -> None:
    config = write_config(tmp_path, clips, validation=HELD_OUT, validate_every=2, max_steps=2)
    alone, _ = train_here(config, "--exp-name", "alone")
    code, _, error = finish(start("train", config, "--exp-name", "two", *layout, processes=2))
    assert code == 0, error
    ours, theirs = losses(alone.folder), losses(tmp_path / "outputs" / "two")
    assert list(ours) == list(theirs)
    for moment, line in ours.items():
        assert theirs[moment]["clips"] == line["clips"]
        assert theirs[moment]["loss"] == pytest.approx(line["loss"], rel=1e-4)


@pytest.mark.parametrize(
    ("validation", "said"),
    [
        ({"prompts": PROMPTS[:1], "references": ["gone.png"]}, ("validation: ref 'gone.png'", "no such file")),
        ({"prompts": PROMPTS, "references": ["a.png"]}, ("validation", "1 for 3 prompts")),
        ({"prompts": []}, ("validation", "nothing to make", "heldout = 0.01")),
        ({"data_path": "a.csv", "heldout": 0.1}, ("validation", "keep one of the two")),
        ({"data_path": "gone.csv"}, ("gone.csv",)),
        ({"prompts": PROMPTS, "sampling_option": {"steps": 3}}, ("validation.sampling_option.steps",)),
    ],
    ids=["image", "count", "none", "both", "table", "key"],
)
def test_a_mistake_is_refused_before_the_run_has_a_folder(
    clips: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], validation: dict, said: tuple[str, ...]
) -> None:
    config = write_config(tmp_path, clips, **OF_IMAGES, validation=validation, validate_every=2)
    code, _, error = run_command(capsys, ["train", config])
    assert_one_sentence(code, error, *said)
    assert not (tmp_path / "outputs").exists()


@pytest.mark.slow
def test_a_run_on_stored_latents_makes_videos_too(clips: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, clips, validation=VALIDATION, validate_every=3)
    with pytest.raises(SystemExit):
        main(["data", "encode", str(config), "--dataset.views", "2", "-o", str(tmp_path / "store")])
    own = ("--dataset.views", "2", "--max-steps", "4")
    online, _ = train_here(config, *own)
    stored, _ = train_here(config, *own, "--dataset.latents", str(tmp_path / "store"))
    assert exact(stored.folder) == exact(online.folder)
    assert_same_videos(made(stored.folder), made(online.folder))
