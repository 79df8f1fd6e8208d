"""A mistake of the user ends in one sentence that names place, value and remedy, and exit code 2."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from longtake.train import run as run_module
from longtake.train.health import weights
from longtake.train.optimizer.update import WeightUpdate
from longtake.train.run_file import read_run
from tests.train.runs import assert_one_sentence, metrics, run_command, steps_saved, train_here, write_config

Capture = pytest.CaptureFixture[str]


def refused(capsys: Capture, words: list[object], *parts: str, lines: int = 1) -> None:
    """The command line `words` ends as a mistake should, with `parts` in what it says."""
    code, _, error = run_command(capsys, words)
    assert_one_sentence(code, error, *parts)
    assert len(error.strip().splitlines()) == lines, error


def test_a_missing_run(capsys: Capture) -> None:
    refused(capsys, ["train"], "found nothing where RUN is expected", "write `longtake train RUN")
    refused(capsys, ["train", "--lr", "1"], "found --lr where RUN is expected")


def test_a_run_that_is_not_there(capsys: Capture, tmp_path: Path) -> None:
    code, _, error = run_command(capsys, ["train", tmp_path / "nothing.py"])
    assert code == 2
    assert "nothing.py" in error
    assert "Traceback" not in error


def test_a_run_that_is_no_run(capsys: Capture, tmp_path: Path) -> None:
    refused(capsys, ["train", tmp_path], f"{tmp_path}: no config.py in it", "give a config file, or the folder")
    for stage in ("first", "second"):
        (tmp_path / stage).mkdir()
        (tmp_path / stage / "config.py").touch()
    refused(
        capsys,
        ["train", tmp_path],
        f"{tmp_path}: holds the runs first, second; give one of these folders, such as {tmp_path}/second",
    )


def test_missing_files_of_a_run_are_named_together(capsys: Capture, tmp_path: Path) -> None:
    keys = ("dataset.data_path", "model.from_pretrained", "ae.from_pretrained", "t5.from_pretrained")
    places = [tmp_path / f"gone{number}.safetensors" for number, _ in enumerate(keys)]
    flags = [word for key, place in zip(keys, places, strict=True) for word in (f"--{key}", str(place))]
    code, _, error = run_command(capsys, ["train", "opensora_v2/stage1", *flags, "--clip.from_pretrained", tmp_path])
    assert code == 2
    named = [[place.name for place in places if place.name in line] for line in error.splitlines()]
    assert named == [[place.name] for place in places]


@pytest.mark.parametrize("name", ["256px", "t2i2v_768px"])
def test_a_run_file_of_generation_is_told_from_one_of_training(capsys: Capture, name: str) -> None:
    preset = Path(__file__).parents[2] / "configs" / "opensora_v2" / "inference" / f"{name}.py"
    for words in (["train", preset], ["train", preset, "--tiny", "--stage", "x"], ["plan", preset]):
        refused(capsys, words, f"{preset}: has ", "so it is a run file of `longtake generate")


def test_two_rates_of_which_one_would_not_count(capsys: Capture, config: Path) -> None:
    both = ["train", config, "--optim.lr", "0.5", "--lr", "1"]
    refused(capsys, both, "optim.lr = 0.5 (--optim.lr): counts in place of --lr 1", "keep one of the two")
    refused(capsys, ["train", config, "--eps", "1e-8", "--optim", '{"eps": 1e-9}'], "optim.eps = 1e-09 (--optim)")
    assert read_run(str(config), ["--optim.lr", "1.0", "--lr", "1"]).value.optim.lr == 1
    with config.open("a") as file:
        file.write("optim = dict(lr=2 * lr, eps=1e-7)\n")
    assert read_run(str(config), ["--lr", "1"]).value.optim.lr == 2
    refused(capsys, ["train", config, "--eps", "1e-8"], "optim.eps = 1e-07 (", "tiny.py:", "write --optim.eps 1e-08")


def test_a_missing_table(capsys: Capture, tmp_path: Path) -> None:
    table = tmp_path / "nothing.parquet"
    refused(capsys, ["train", write_config(tmp_path, table)], f"{table}: no such file", "give a clip table")
    assert not (tmp_path / "outputs").exists()


def test_a_table_without_its_columns(capsys: Capture, tmp_path: Path) -> None:
    table = tmp_path / "clips.csv"
    table.write_text("file,text\na.mp4,a red circle\n", encoding="utf-8")
    refused(capsys, ["train", write_config(tmp_path, table)], f"{table}: column path", "longtake data probe")


def test_an_unknown_key(capsys: Capture, config: Path) -> None:
    code, _, error = run_command(capsys, ["train", config, "--optim.learning_rate", "1"])
    assert code == 2
    assert "--optim.learning_rate" in error
    assert "Traceback" not in error


def test_a_damaged_checkpoint(capsys: Capture, config: Path) -> None:
    outcome, _ = train_here(config, "--max-steps", "1")
    file = sorted(outcome.checkpoint.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-1])
    refused(capsys, ["train", outcome.folder], f"{outcome.checkpoint}: is damaged", file.name, "none is left")


def test_no_clip_fits_any_bucket(capsys: Capture, tmp_path: Path, clips: Path) -> None:
    config = write_config(tmp_path, clips, bucket_config={"1024px": {8: (1.0, 1)}})
    refused(capsys, ["train", config], "bucket_config: none of the 40 clips fits a bucket", "add a lower resolution")
    assert list((tmp_path / "outputs").iterdir()) == []


def test_frames_that_the_autoencoder_cannot_divide(capsys: Capture, tmp_path: Path, clips: Path) -> None:
    config = write_config(tmp_path, clips, bucket_config={"32px": {12: (1.0, 1)}})
    refused(capsys, ["train", config], "ae.temporal = 8: 12 frames", "choose at most 8 or a multiple")


def test_a_model_that_does_not_fit_the_autoencoder(capsys: Capture, config: Path) -> None:
    refused(capsys, ["train", config, "--model.in_channels", "64"], "model.in_channels = 64", "= 1536")


def test_text_that_does_not_fit_the_model(capsys: Capture, config: Path) -> None:
    refused(capsys, ["train", config, "--t5.dim", "32"], "t5.dim = 32", "model.context_in_dim is 16")


def test_a_mesh_that_does_not_fit_the_processes(capsys: Capture, config: Path) -> None:
    refused(
        capsys,
        ["train", config, "--parallel.replicate", "2"],
        "parallel.replicate = 2",
        "write 1, or start 2 processes",
    )
    refused(capsys, ["train", config, "--parallel.shard", "4"], "parallel.shard = 4: makes 4 ranks", "choose shard = 1")


def test_a_device_that_is_not_there(capsys: Capture, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    refused(capsys, ["train", config, "--device", "cuda"], 'device = "cuda"', 'choose "cpu" or "auto"')


def test_weights_of_another_model(capsys: Capture, config: Path) -> None:
    outcome, _ = train_here(config, "--max-steps", "1")
    refused(
        capsys,
        ["train", config, "--load", outcome.checkpoint, "--model.depth", "2"],
        f"{outcome.checkpoint}: has no ",
        "double_blocks.1",
    )


def test_an_empty_mp4_is_left_out_by_probing_and_costs_nothing_else(
    capsys: Capture, tmp_path: Path, clips: Path
) -> None:
    folder = Path(shutil.copytree(clips.parent, tmp_path / "clips"))
    (folder / "clips" / "clip_00000.mp4").write_bytes(b"")
    code, said, _ = run_command(capsys, ["data", "probe", folder / "clips.csv", "-o", folder / "probed.parquet"])
    assert code == 0
    assert "39 clips" in said
    assert "clip_00000.mp4" in (folder / "probed.bad.csv").read_text(encoding="utf-8")
    code, said, _ = run_command(capsys, ["train", write_config(tmp_path, folder / "probed.parquet", max_steps=1)])
    assert code == 0
    assert "39 of 39 clips used" in said


def test_weights_out_of_bounds_after_one_step_are_not_saved(capsys: Capture, tmp_path: Path, clips: Path) -> None:
    config = write_config(tmp_path, clips, ckpt_every=1, lr=1e30, warmup_steps=0)
    refused(capsys, ["train", config], "step 1: ", "above 1e+06 (model.", "no checkpoint is written")
    assert steps_saved(tmp_path / "outputs" / "tiny") == []


def test_weights_that_a_step_has_ruined_are_not_saved_though_the_loss_is_finite(
    capsys: Capture, tmp_path: Path, clips: Path
) -> None:
    """Also by the last step of a run, which no further one confirms."""
    config = write_config(tmp_path, clips, ckpt_every=1, lr=3e7, warmup_steps=2, max_steps=3)
    refused(capsys, ["train", config], "step ", "above 1e+06 (model.", "no checkpoint is written")
    last = metrics(tmp_path / "outputs" / "tiny")[-1]["step"]
    assert last not in steps_saved(tmp_path / "outputs" / "tiny")


@pytest.mark.parametrize("async_io", [True, False])
def test_checkpoint_that_no_step_confirms_neither_displaces_nor_replaces_the_last_good_one(
    capsys: Capture, tmp_path: Path, clips: Path, monkeypatch: pytest.MonkeyPatch, async_io: bool
) -> None:
    def ruin(update: WeightUpdate, step: int, *arguments: object) -> None:
        original(update, step, *arguments)
        if step == 3:
            for parameter in update.optimizer.parameters.values():
                parameter.data.mul_(1e15)

    original = WeightUpdate.__call__
    monkeypatch.setattr(WeightUpdate, "__call__", ruin)
    monkeypatch.setattr(weights, "LARGEST", 1e18)  # else they are not saved at all
    config = write_config(tmp_path, clips, ckpt_every=1, keep_n_latest=1, async_io=async_io)
    said = "step 9: the loss of bucket 32px/", "is not finite", "is now epoch0-global_step3.damaged", "a lower lr"
    refused(capsys, ["train", config, "--max-steps", "100"], *said)
    folder = tmp_path / "outputs" / "tiny"
    assert steps_saved(folder) == [2]
    assert [line["step"] for line in metrics(folder) if line.get("skipped")] == [4, 5, 6, 7, 8, 9]
    monkeypatch.undo()
    train_here(folder, "--max-steps", "5")
    assert steps_saved(folder) == [5]


def test_weights_that_overflow_in_a_step_are_named_and_not_saved(
    capsys: Capture, tmp_path: Path, clips: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ruin(update: WeightUpdate, step: int, *arguments: object) -> None:
        original(update, step, *arguments)
        if step == 2:
            next(iter(update.optimizer.parameters.values())).data.view(-1)[0] = float("inf")

    original = WeightUpdate.__call__
    monkeypatch.setattr(WeightUpdate, "__call__", ruin)
    config = write_config(tmp_path, clips, ckpt_every=1)
    refused(
        capsys, ["train", config], "step 2: ", "infinity or weights above 1e+06 (model.", "no checkpoint is written"
    )
    assert steps_saved(tmp_path / "outputs" / "tiny") == [1]


def test_loss_that_is_not_finite_from_the_first_step_names_broken_weights(
    capsys: Capture, tmp_path: Path, clips: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*arguments: object, **options: object) -> object:
        system = original(*arguments, **options)
        next(iter(system.denoiser.parameters())).data.view(-1)[0] = float("nan")
        return system

    original = run_module.build_system
    monkeypatch.setattr(run_module, "build_system", build)
    config = write_config(tmp_path, clips, max_skipped=0)
    refused(capsys, ["train", config], "step 1: ", "is not finite: weights hold NaN, infinity or values above 1e+06 (")


def test_a_gradient_that_is_not_finite_ends_a_run_that_may_leave_out_no_step(
    capsys: Capture, tmp_path: Path, clips: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overflow = torch.tensor(float("inf"))
    monkeypatch.setattr("longtake.train.optimizer.sharded.ShardedAdamW.grad_square_sum", lambda _: overflow)
    config = write_config(tmp_path, clips, ckpt_every=1, max_skipped=0)
    refused(capsys, ["train", config], "step 1: the gradient norm is not finite", "grad_clip = 1.0")
    assert steps_saved(tmp_path / "outputs" / "tiny") == []
