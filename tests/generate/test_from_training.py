"""From a tiny training run of a preset to videos by a preset of inference: its folder, a glob of it, adapters on it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from longtake.contracts import UserError
from longtake.data.clips.transforms import resize_crop
from longtake.data.clips.video import write_image
from longtake.data.probing.probe import probe_table
from longtake.data.shapes import make_shapes
from longtake.generate.checks import check_request
from longtake.generate.run import generate_from, read_video
from longtake.generate.source import resolve_source
from longtake.parallel.world import start_world
from longtake.system.export import export_adapters
from longtake.train.run import Outcome, train_run
from longtake.weights.adapters import Adapter
from longtake.weights.lora import layers_of, save_adapters
from longtake.weights.mmdit import FORMAT
from tests.generate.runs import keep_written

CONFIGS = Path(__file__).parents[2] / "configs" / "opensora_v2"
TINY = ("--tiny", "--device", "cpu", "--dtype", "fp32", "--master-dtype", "fp32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shapes")
    clips = make_shapes(folder, num_clips=4, num_stills=0)
    probe_table(clips, folder / "clips.parquet")
    return folder


def train(preset: str, folder: Path, *flags: str) -> Outcome:
    own = ("--dataset.data-path", str(folder / "clips.parquet"), "--outputs", str(folder / "outputs"))
    buckets = (
        "--bucket-config",
        '{"_delete_": True, "32px": {9: (1.0, 2)}}',
        "--max-steps",
        "2",
        "--tensorboard",
        "False",
    )
    words = [*TINY, *own, *buckets, "--exp-name", preset, "--lr", "1e-2", *flags]
    return train_run(str(CONFIGS / "train" / f"{preset}.py"), words, Console(quiet=True))


@pytest.fixture(scope="module")
def run(folder: Path) -> Outcome:
    """A run with known frames."""
    return train("stage1_i2v", folder, "--model.from-pretrained", "None")


def make(target: Path, *flags: str) -> tuple[np.ndarray, list[str]]:
    """The frames of one video of 9 frames, and what was said."""
    words = [*TINY, "--prompt", "a red circle", "--num-frames", "9", "--save-dir", str(target), *flags]
    said: list[str] = []
    source = resolve_source(str(CONFIGS / "inference" / "256px.py"), words)
    with start_world("cpu") as world:
        (video,) = generate_from(source, world, said.append)
    return read_video(video.path), said


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    """Peak signal-to-noise ratio of bytes, in dB."""
    return float(10 * np.log10(255**2 / np.mean((a.astype(float) - b) ** 2)))


def test_a_run_of_training_is_sampled_from_by_folder_and_by_glob(run: Outcome, tmp_path: Path):
    whole, said = make(tmp_path, "--model.from-pretrained", str(run.folder))
    globbed, _ = make(tmp_path, "--model.from-pretrained", f"{run.folder}/epoch*-global_step*")
    assert said[0].startswith("weights: ")
    assert str(run.checkpoint) in said[0]
    assert np.array_equal(whole, globbed)
    assert (whole != make(tmp_path)[0]).any()


def test_a_tiny_run_makes_tiny_videos_by_itself(run: Outcome, tmp_path: Path):
    said: list[str] = []
    source = resolve_source(str(run.folder), ["--prompt", "x", "--save-dir", str(tmp_path), "--num-steps", "2"])
    with start_world("cpu") as world:
        (video,) = generate_from(source, world, said.append)
    assert said[0].startswith("32px, 9 frames, as in the run's bucket_config")
    assert len(read_video(video.path)) == 9


def test_the_first_frame_of_the_file_is_the_given_image(run: Outcome, tmp_path: Path):
    down, across = (np.linspace(0, 255, size).astype(np.uint8) for size in (48, 80))
    colours = np.broadcast_arrays(down[:, None], across[None], np.uint8(60))  # no two channels, no two sides alike
    write_image(tmp_path / "a.png", np.stack(colours, axis=-1))
    image = ("--cond-type", "i2v_head", "--ref", str(tmp_path / "a.png"))
    frames, _ = make(tmp_path, "--model.from-pretrained", str(run.folder), *image)
    given = resize_crop(read_video(tmp_path / "a.png"), frames.shape[1:3], still=True)[:, 0].permute(1, 2, 0).numpy()
    assert psnr(frames[0], given) > 35  # all that H.264 takes away


def test_adapters_on_top_have_a_strength(run: Outcome, folder: Path, tmp_path: Path):
    base = ("--model.from-pretrained", str(run.folder))
    trained = train("lora", folder, *base, "--ema-decay", "None")
    file = export_adapters(str(trained.folder), tmp_path / "adapters", "peft")
    plain, _ = make(tmp_path, *base)
    lines = [make(tmp_path, *base, "--lora", str(file), "--lora-scale", scale) for scale in ("0", "1", "8")]
    made = [frames for frames, _ in lines]
    assert f"adapters: 20 layers of {file}, rank 4, strength 8" in lines[2][1]
    assert np.array_equal(made[0], plain)
    change = [np.abs(frames.astype(int) - plain).mean() for frames in made]
    assert 0 < change[1] < change[2]
    own, merged = str(trained.folder), ("--model.from-pretrained", str(trained.folder), "--lora-scale", "0")
    assert resolve_source(own, ["--lora-scale", "0"]).config.lora.strength == 0
    with pytest.raises(UserError, match="there are no adapters"):  # they are merged into the weights
        resolve_source(str(CONFIGS / "inference" / "256px.py"), [*TINY, *merged])
    with pytest.raises(UserError, match="there are no adapters"):  # the run's are left behind
        resolve_source(own, ["--model.from-pretrained", "other.safetensors", "--lora-scale", "0"])


def test_weights_that_never_saw_known_frames_are_told_of(folder: Path, tmp_path: Path):
    run = train("stage1", folder, "--model.from-pretrained", "None")
    write_image(tmp_path / "a.png", np.zeros((48, 80, 3), np.uint8))
    words = [*TINY, "--prompt", "x", "--num-frames", "9", "--model.from-pretrained", str(run.folder)]
    preset = str(CONFIGS / "inference" / "256px.py")
    assert check_request(resolve_source(preset, words).config) == []
    negative = [*words, "--negative-prompt", "blurry", "--sampling_option.guidance"]
    assert check_request(resolve_source(preset, [*negative, "2"]).config) == []
    (line,) = check_request(resolve_source(preset, [*negative, "1"]).config)
    assert line.startswith("negative_prompt: ")
    known = ["--cond-type", "i2v_head", "--ref", str(tmp_path / "a.png")]
    (line,) = check_request(resolve_source(preset, [*words, *known]).config)
    assert "has no cond_in" in line
    assert "never trained on conditioning frames" in line
    (tmp_path / "chain.csv").write_text("text,carries\nx,\ny,i2v_head\n")
    chained = [*TINY, "--prompts", str(tmp_path / "chain.csv"), *words[words.index("--num-frames") :]]
    (line,) = check_request(resolve_source(preset, chained).config)
    assert 'so for carries = "i2v_head" the model was never trained on conditioning frames' in line
    with pytest.raises(UserError, match=r"set model\.grow_cond_in to True"):
        check_request(resolve_source(preset, [*words, *known, "--model.grow-cond-in", "False"]).config)


def test_video_of_nan_is_not_written(tmp_path: Path) -> None:
    words = [*TINY, "--prompt", "x", "--num-frames", "9", "--num-steps", "1", "--save-dir", str(tmp_path / "out")]
    preset = str(CONFIGS / "inference" / "256px.py")
    model = resolve_source(preset, words).config.model
    rows, columns = layers_of(FORMAT, model, FORMAT.own(model))["final_layer.linear"]
    adapter = Adapter(torch.full((1, columns), 1e30), torch.full((rows, 1), 1e30), 1.0)
    save_adapters(FORMAT, {"final_layer.linear": adapter}, model, tmp_path / "a", "peft")
    with start_world("cpu") as world, pytest.raises(UserError, match="NaN or infinite"):
        generate_from(resolve_source(preset, [*words, "--lora", str(tmp_path / "a")]), world, lambda line: None)
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]


def test_tensors_for_a_text_encoder_are_counted_in_a_line(tmp_path: Path) -> None:
    words = [*TINY, "--prompt", "x", "--num-frames", "9", "--num-steps", "1", "--save-dir", str(tmp_path / "out")]
    preset = str(CONFIGS / "inference" / "256px.py")
    model = resolve_source(preset, words).config.model
    rows, columns = layers_of(FORMAT, model, FORMAT.own(model))["final_layer.linear"]
    tensors = {"final_layer.linear.lora_A.weight": torch.zeros(1, columns)}
    tensors |= {"final_layer.linear.lora_B.weight": torch.zeros(rows, 1)}
    tensors |= {f"lora_te1_text_model_encoder_layers_0_mlp_fc1.{end}": torch.ones(1) for end in ("alpha", "hada_w1_a")}
    save_file(tensors, tmp_path / "a.safetensors")
    lines: list[str] = []
    with start_world("cpu") as world:
        generate_from(resolve_source(preset, [*words, "--lora", str(tmp_path / "a.safetensors")]), world, lines.append)
    assert sum("2 tensors" in line and "text encoder" in line for line in lines) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_given_image_is_the_first_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    written = keep_written(monkeypatch)
    pixels = np.random.default_rng(0).integers(0, 256, (50, 70, 3), np.uint8)
    write_image(tmp_path / "a.png", pixels)
    known = ("--cond-type", "i2v_loop", "--ref", str(tmp_path / "a.png"), "--num-sample", "2", "--batch-size", "2")
    flags = ["--tiny", "--device", "cuda", "--prompt", "x", "--save-dir", str(tmp_path), *known]
    with start_world("cuda") as world:
        generate_from(resolve_source(str(CONFIGS / "inference" / "256px.py"), flags), world, lambda text: None)
    assert len(written) == 2
    for frames in written.values():
        given = resize_crop(pixels[None], frames.shape[1:3], still=True)[:, 0].permute(1, 2, 0).numpy()
        assert np.array_equal(frames[0], given)
        assert np.array_equal(frames[-1], given)
