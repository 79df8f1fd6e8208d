"""Open-Sora 1.2 from a config file: trained with masks, resumed, sampled, planned, encoded ahead and exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from longtake.data.clips.video import read_frames, write_video
from longtake.models.build import build_denoiser
from longtake.models.stdit3 import STDiT3
from longtake.presets import find_preset
from longtake.train.run_file import read_run
from tests.cli.conftest import longtake
from tests.models.initialised import initialise
from tests.train.conftest import clips  # a fixture
from tests.train.runs import exact, metrics, tensors, train_here, write_config

__all__ = ["clips", "longtake"]

KEYS: dict[str, Any] = {
    "model": {
        "type": "stdit3",
        "in_channels": 192,
        "hidden_size": 32,
        "depth": 1,
        "num_heads": 2,
        "caption_channels": 16,
        "model_max_length": 8,
        "input_sq_size": 64,
    },
    "ae": {"type": "pixel", "temporal": 1, "spatial": 8},
    "dropout_ratio": {"t5": 0.1},
    "condition_config": {"identity": 1.0, "image_head": 1.0, "quarter_tail": 1.0, "random": 1.0},
    "freeze": ("y_embedder",),
    "bucket_config": {"32x32": {1: (1.0, 4), 8: (1.0, 3), 12: ((1.0, 0.5), 2)}},
}


@pytest.fixture(scope="module")
def run(clips: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_config(tmp_path_factory.mktemp("run"), clips)
    text = (
        path.read_text()
        .replace("\nmodel = dict(", "\n_unused = dict(")
        .replace("\nobjective = dict(", "\n_too = dict(")
    )
    path.write_text(text + "".join(f"{key} = {value!r}\n" for key, value in KEYS.items()))
    return path


@pytest.fixture(scope="module")
def whole(run: Path) -> Path:
    return train_here(run, "--exp_name", "whole", "--max_steps", "4")[0].folder


def test_it_trains_with_masks_and_resumes_as_if_it_had_not_stopped(run: Path, whole: Path) -> None:
    cut, _ = train_here(run, "--exp_name", "cut", "--max_steps", "2")
    train_here(cut.folder, "--max_steps", "4")
    assert exact(cut.folder) == exact(whole)
    assert all(line["loss"] > 0 for line in metrics(whole))


def test_the_model_is_told_by_x_mask_which_frames_are_given(
    longtake: Any, run: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, seen = STDiT3.forward, []

    def spied(self: STDiT3, x: Any, t: Any, conditions: Any) -> Any:
        assert t.shape == (len(x),)
        seen.append((x.shape[2], conditions.get("x_mask")))
        return forward(self, x, t, conditions)

    monkeypatch.setattr(STDiT3, "forward", spied)
    train_here(run, "--exp_name", "told", "--max_steps", "2", "--outputs", str(tmp_path))
    assert all(mask.shape[1] == frames for frames, mask in seen)
    assert not all(mask.all() for _, mask in seen)
    seen.clear()
    write_video(tmp_path / "ref.mp4", np.zeros((8, 32, 32, 3), np.uint8), 24)
    words = ("--sampling-option.resolution", "32x32", "--num-frames", 8, "--num-steps", 2, "--save-dir", tmp_path)
    strategy = ("--cond-type", "0,0,0,0,1;0,0,1,1,2,0.6", "--ref", tmp_path / "ref.mp4")
    assert longtake("generate", whole, "--prompt", "a", *words, *strategy)[0] == 0
    masks = [["".join("01"[one] for one in row) for row in mask.tolist()] for _, mask in seen]
    assert masks == [["00011111"] * 2, ["01111111"] * 2]  # at times 1000 and 500


def frames_of(folder: Path) -> np.ndarray:
    (path,) = folder.rglob("*.mp4")
    return read_frames(path)


def test_it_generates_from_text_and_from_frames_by_strategies(longtake: Any, whole: Path, tmp_path: Path) -> None:
    """In several clips, each with its text, from a run and from an export alike."""
    rng = np.random.default_rng(0)
    video = np.kron(rng.integers(0, 256, (40, 2, 2, 3)), np.ones((1, 16, 16, 1))).astype(np.uint8)
    write_video(tmp_path / "ref.mp4", video, 24)
    assert longtake("checkpoint", "export", whole, tmp_path / "w.safetensors")[0] == 0
    size = ("--sampling-option.resolution", "32x32", "--num-frames", 8, "--num-steps", 2)
    tail = f'{{"reference_path": "{tmp_path}/ref.mp4", "mask_strategy": "0,0,2,0,3;1,0,0,-1,1"}}'
    for name, source in (("run", whole), ("file", tmp_path / "w.safetensors")):
        words = ("--prompt", "|0|A red circle |1| a BLUE one " + tail, "--save-dir", tmp_path / name)
        code, _, err = longtake("generate", source, *words, *size, "--num-clips", 2, "--carries", "0,,-2,0,2")
        assert code == 0, err
    made = frames_of(tmp_path / "run")
    assert np.array_equal(made, frames_of(tmp_path / "file"))
    assert made.shape == (8 + 6, 32, 32, 3)
    (said,) = (tmp_path / "run").rglob("*.txt")
    assert said.read_text() == "a red circle\na blue one\n"
    given = read_frames(tmp_path / "ref.mp4")
    assert np.abs(made[:3].astype(int) - given[2:5]).mean() < 12  # after H.264
    assert np.abs(made[-1].astype(int) - given[0]).mean() < 12
    assert np.abs(made[3].astype(int) - given[5]).mean() > 12
    code, _, err = longtake("generate", whole, "--prompt", "a circle", *size, "--save-dir", tmp_path / "text")
    assert code == 0, err


def test_strategies_that_ask_for_too_much_are_cut_or_refused(longtake: Any, whole: Path, tmp_path: Path) -> None:
    write_video(tmp_path / "ref.mp4", np.zeros((8, 32, 32, 3), np.uint8), 24)
    write_video(tmp_path / "short.mp4", np.zeros((3, 32, 32, 3), np.uint8), 24)

    def asked(strategy: str, ref: str, *words: Any) -> tuple[int, str]:
        size = ("--sampling-option.resolution", "32x32", "--num-frames", 8, "--num-steps", 1, "--save-dir", tmp_path)
        given = ("--cond-type", strategy, "--ref", tmp_path / ref)
        code, out, err = longtake("generate", whole, "--prompt", "a", *size, *given, *words)
        return code, " ".join((out + err).split())

    for strategy, fault in {
        "0,0,0,-9": "choose a target from -8",
        "0,0,0,8": "choose a target from -8 to 7",
        "0,0,0,0,0": "and a length from 1",
        "1,0,0,0,1": "is about no clip, counted from 0, that there is in num_clips = 1",
        "0,0,0,0,99": "gives all 8 latent frames, and none is left to be made",
        "0,0,8,0,1": "has 8 frames at 24 FPS, and",
    }.items():
        code, said = asked(strategy, "ref.mp4")
        assert code == 2, said
        assert fault in said
    for strategy, words in (("0,0,0,0,99,0.5", ()), ("0,0,0,0,99", ("--edit-ratio", 0.5)), ("0,0,0,0,7", ())):
        code, said = asked(strategy, "ref.mp4", *words)
        assert code == 0, said
    for tail in ('"mask_strategy": "0"', '"mask_strategy": "1,0,0,0,1"'):
        words = ("--prompt", f"a {{{tail}}}", "--num-clips", 2, "--carries", "extend")
        code, out, err = longtake("generate", whole, *words, "--num-frames", 8, "--save-dir", tmp_path)
        assert code == 2, out + err
        assert "there is no file that they are taken from" in " ".join(err.split())
    words = ("--prompt", "a", "--cond-type", "0", "--ref", "https://example.com/a.png", "--num-frames", 8)
    assert "references are files; fetch it" in " ".join(longtake("generate", whole, *words)[2].split())
    code, said = asked("1,0,-5,0,5", "short.mp4", "--num-clips", 2, "--carries", "extend")
    assert code == 0, said
    assert "short.mp4': has 3 frames at 24 FPS, so it gives 3 latent frames, not 5" in said
    code, said = asked("1,0,5,0,5", "short.mp4", "--num-clips", 2, "--carries", "extend")
    assert "has 3 frames at 24 FPS, and" in said


def test_a_run_from_a_store_is_the_run_that_encodes(longtake: Any, run: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    code, _, err = longtake("data", "encode", run, "--dataset.views", 2, "-o", store)
    assert code == 0, err
    words = ("--max_steps", "2", "--dataset.views", "2", "--outputs", str(tmp_path))
    online, _ = train_here(run, "--exp_name", "online", *words)
    stored, _ = train_here(run, "--exp_name", "stored", "--dataset.latents", str(store), *words)
    assert exact(stored.folder) == exact(online.folder)


def test_adapters_take_the_place_of_what_a_run_freezes(run: Path, tmp_path: Path) -> None:
    outcome, _ = train_here(run, "--lora.rank", "2", "--max_steps", "1", "--outputs", str(tmp_path))
    names = set()
    for path in outcome.folder.glob("epoch*/*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names |= set(file.keys())
    assert names
    assert all("lora" in name for name in names), names


def test_it_is_planned(longtake: Any, run: Path) -> None:
    code, out, err = longtake("plan", run, "--gpus", 8, "--gpu", "h100")
    assert code == 0, err
    assert "32x32/12f" in out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stage1", "lambda_6"])
def test_a_preset_trains_at_a_small_size(name: str, clips: Path, tmp_path: Path) -> None:
    words = ("--tiny", "--dataset.data-path", str(clips), "--outputs", str(tmp_path), "--max_steps", "1")
    outcome, _ = train_here(Path(find_preset(f"opensora_v1_2/{name}")), *words)
    assert outcome.clock.global_step == 1


@pytest.mark.slow
def test_stages_of_the_recipe_go_on_from_weights_as_trained(longtake: Any, clips: Path, tmp_path: Path) -> None:
    words = ("--tiny", "--dataset.data-path", clips, "--outputs", tmp_path, "--max-steps", 1, "--device", "cpu")
    code, out, err = longtake("train", "opensora_v1_2/lambda", *words)
    assert code == 0, err
    runs = sorted((tmp_path / "lambda").glob("stage?"))
    assert [run.name for run in runs] == [f"stage{number}" for number in range(1, 8)]
    said = [line for line in out.splitlines() if "weights:" in line and " from /" in line]
    assert len(said) == 6
    assert all("as trained" in line for line in said)


@pytest.mark.slow
def test_the_eight_steps_from_pixart_hand_on_weights(clips: Path, tmp_path: Path, longtake: Any) -> None:
    words = ["--tiny", "--dataset.data-path", str(clips), "--outputs", str(tmp_path), "--max-steps", "1"]
    preset, file = str(find_preset("opensora_v1_2/adapt")), tmp_path / "mine.pth"
    model = build_denoiser(read_run(preset, [*words, "--stage", "sizes"]).value.model)
    initialise(model, 3)
    state = {
        name.replace("spatial_blocks.", "blocks."): value.squeeze(2) if name.startswith("x_embedder.proj.w") else value
        for name, value in model.state_dict().items()
        if not name.startswith(("temporal_blocks.", "fps_embedder."))
    }
    torch.save({"state_dict": state}, file)
    code, said, _ = longtake("train", preset, *words, "--model.from_pretrained", file)
    assert code == 0
    assert said.count("done at step 1") == 8
    assert "no norms of queries and keys: they start at one" in said
    folder = tmp_path / "opensora_v1_2_adapt"
    last = "model.temporal_blocks.0.mlp.fc2.weight"
    assert not tensors(folder / "sizes" / "frozen")[last].any()
    assert tensors(folder / "temporal_videos" / "epoch0-global_step1")[last].any()
