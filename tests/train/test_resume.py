"""Starting from checkpoints, in one process: what goes on, what begins anew, what is kept."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from longtake.checkpoint.folder import is_complete
from longtake.contracts import UserError
from tests.train.runs import (
    STEPS_PER_PASS,
    assert_same_bits,
    exact,
    metrics,
    state_of,
    steps_saved,
    tensors,
    train_here,
    write_config,
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, clips: Path) -> Path:
    """The folder of a run of 8 steps, two passes, with a checkpoint of every step."""
    config = write_config(tmp_path_factory.mktemp("undisturbed"), clips, ckpt_every=1)
    return train_here(config)[0].folder


def checkpoint(folder: Path, step: int) -> Path:
    return next(folder.glob(f"epoch*-global_step{step}"))


@pytest.mark.parametrize("stop", [1, STEPS_PER_PASS, STEPS_PER_PASS + 1], ids=lambda stop: f"after step {stop}")
def test_a_run_in_two_parts_is_the_run_in_one(undisturbed: Path, config: Path, stop: int) -> None:
    first, _ = train_here(config, "--max-steps", str(stop))
    assert steps_saved(first.folder) == [stop]
    second, said = train_here(first.folder, "--max-steps", "8")
    assert second.folder == first.folder
    assert f"starts from {first.checkpoint}, step {stop}" in said
    assert exact(second.folder) == exact(undisturbed)
    assert_same_bits(second.checkpoint, checkpoint(undisturbed, 8))


def test_loaders_in_other_processes_change_no_bit(undisturbed: Path, config: Path) -> None:
    first, _ = train_here(config, "--num-workers", "2", "--max-steps", "3")
    second, _ = train_here(first.folder, "--num-workers", "1", "--max-steps", "8")
    assert exact(second.folder) == exact(undisturbed)
    assert_same_bits(second.checkpoint, checkpoint(undisturbed, 8))


def test_each_moment_is_saved_once_also_where_the_end_meets_a_checkpoint(undisturbed: Path) -> None:
    assert steps_saved(undisturbed) == list(range(1, 9))


def test_a_finished_run_is_left_as_it_is(config: Path) -> None:
    first, _ = train_here(config, "--max-steps", "4", "--epochs", "1")
    before = exact(first.folder), sorted(first.folder.iterdir())
    second, said = train_here(first.folder, "--max-steps", "100")
    assert (exact(second.folder), sorted(first.folder.glob("epoch*"))) == (before[0], [first.checkpoint])
    assert second.clock == first.clock
    assert second.checkpoint == first.checkpoint
    assert f"done at step 4; checkpoint: {first.checkpoint}" in said


@pytest.mark.parametrize("load", [False, True], ids=["continued", "loaded"])
def test_a_last_step_that_is_made_already_leaves_every_file_as_it_was(config: Path, load: bool) -> None:
    first, _ = train_here(config, "--max-steps", "2")
    before = {path: path.read_bytes() for path in first.folder.parent.rglob("*") if path.is_file()}
    run, words = (config, ["--load", str(first.checkpoint)]) if load else (first.folder, [])
    second, said = train_here(run, *words, "--max-steps", "1", "--lr", "0.5")
    assert said == "max_steps = 1: the run is at step 2 already; nothing to train; a larger --max-steps goes on\n"
    assert {path: path.read_bytes() for path in first.folder.parent.rglob("*") if path.is_file()} == before
    assert list(first.folder.parent.iterdir()) == [first.folder]
    assert (second.checkpoint, second.clock) == (first.checkpoint, first.clock)


def test_epochs_end_a_run_as_steps_do(config: Path, undisturbed: Path) -> None:
    outcome, _ = train_here(config, "--epochs", "1", "--max-steps", "100")
    assert outcome.clock.global_step == STEPS_PER_PASS
    assert outcome.clock.samples == 40
    assert_same_bits(outcome.checkpoint, checkpoint(undisturbed, STEPS_PER_PASS))


def test_load_begins_a_new_folder_and_goes_on_with_the_clock(config: Path, undisturbed: Path) -> None:
    first, _ = train_here(config, "--max-steps", "3")
    specs = ("latest", str(first.checkpoint), f"{first.folder}/epoch*-global_step*", str(first.folder))
    for number, spec in enumerate(specs, start=2):
        later, _ = train_here(config, "--load", spec, "--max-steps", "5")
        assert later.folder.name == f"tiny-{number}"
        assert exact(later.folder) == exact(undisturbed)[3:5]
        assert_same_bits(later.checkpoint, checkpoint(undisturbed, 5))
    assert len(exact(first.folder)) == 3


def test_start_step_and_epoch_deal_the_data_anew_and_keep_everything_else(config: Path, undisturbed: Path) -> None:
    second, _ = train_here(
        config, "--load", str(checkpoint(undisturbed, 3)), "--start-step", "0", "--start-epoch", "0", "--max-steps", "7"
    )
    lines = metrics(second.folder)
    assert [line["step"] for line in lines] == [4, 5, 6, 7]
    assert [line["digest"] for line in lines] == [line["digest"] for line in metrics(undisturbed)[:4]]
    assert lines[0]["loss"] != metrics(undisturbed)[0]["loss"]  # the weights go on
    assert second.clock.samples == state_of(checkpoint(undisturbed, 3))["clock"]["samples"] + 40
    moments = "optim.img_in.weight.exp_avg_sq"
    assert tensors(second.checkpoint)[moments].count_nonzero() > 0


def test_start_step_leaves_out_that_many_steps_of_the_pass(config: Path, undisturbed: Path) -> None:
    outcome, _ = train_here(config, "--start-step", "2", "--start-epoch", "1", "--max-steps", "2")
    assert [line["digest"] for line in metrics(outcome.folder)] == [
        line["digest"] for line in metrics(undisturbed)[STEPS_PER_PASS + 2 : STEPS_PER_PASS + 4]
    ]
    assert state_of(outcome.checkpoint)["clock"]["pass_index"] == 1


def test_start_step_alone_stays_in_the_pass_of_the_checkpoint(config: Path, undisturbed: Path) -> None:
    load = ["--load", str(checkpoint(undisturbed, STEPS_PER_PASS + 2))]
    outcome, _ = train_here(config, *load, "--start-step", "1", "--max-steps", str(STEPS_PER_PASS + 4))
    assert [(line["pass"], line["digest"]) for line in metrics(outcome.folder)] == [
        (1, line["digest"]) for line in metrics(undisturbed)[STEPS_PER_PASS + 1 : STEPS_PER_PASS + 3]
    ]


def test_a_first_pass_beyond_the_last_is_refused(config: Path) -> None:
    with pytest.raises(UserError, match=r"start_epoch = 2: .* choose at most 1, or raise epochs"):
        train_here(config, "--start-epoch", "2", "--epochs", "2")


def test_a_run_can_be_loaded_before_its_first_step(tmp_path: Path, clips: Path, undisturbed: Path) -> None:
    """`start_step` beyond the last pass leaves no step: the checkpoint of step 0 holds the initial weights."""
    config = write_config(tmp_path, clips)
    first, _ = train_here(config, "--start-step", "99", "--epochs", "1")
    assert steps_saved(first.folder) == [0]
    second, _ = train_here(config, "--load", str(first.checkpoint), "--max-steps", "4")
    assert exact(second.folder) == exact(undisturbed)[:4]
    assert_same_bits(second.checkpoint, checkpoint(undisturbed, 4))


def test_only_the_latest_checkpoints_stay(config: Path) -> None:
    outcome, _ = train_here(config, "--ckpt-every", "1", "--keep-n-latest", "2", "--max-steps", "5")
    assert steps_saved(outcome.folder) == [4, 5]
    assert all(is_complete(path) for path in outcome.folder.glob("epoch*"))


def test_a_second_launch_overwrites_nothing(config: Path) -> None:
    first, _ = train_here(config, "--max-steps", "1")
    files = {path: path.read_bytes() for path in first.folder.rglob("*") if path.is_file()}
    second, _ = train_here(config, "--max-steps", "1")
    assert second.folder.name == "tiny-2"
    assert {path: path.read_bytes() for path in first.folder.rglob("*") if path.is_file()} == files
    assert_same_bits(first.checkpoint, second.checkpoint)


def test_the_average_is_that_of_the_weights_of_each_step(undisturbed: Path) -> None:
    weights = [tensors(checkpoint(undisturbed, step)) for step in range(1, 9)]
    for name in ("img_in.weight", "single_blocks.0.norm.query_norm.scale"):
        expected = tensors(checkpoint(undisturbed, 1))[f"ema.{name}"].double().numpy()
        for step in range(2, 9):
            decay = min(0.9, (1 + step) / (10 + step))
            expected = decay * expected + (1 - decay) * weights[step - 1][f"model.{name}"].double().numpy()
        average = weights[-1][f"ema.{name}"]
        assert average.dtype == torch.float32
        np.testing.assert_allclose(average.numpy(), expected, rtol=0, atol=1e-6)
        assert not torch.equal(average, weights[-1][f"model.{name}"])


def test_a_checkpoint_without_average_gives_its_weights_for_one(tmp_path: Path, clips: Path) -> None:
    plain, _ = train_here(write_config(tmp_path / "plain", clips, ema_decay=None), "--max-steps", "2")
    assert not any(name.startswith("ema.") for name in tensors(plain.checkpoint))
    config = write_config(tmp_path / "averaged", clips)
    first, _ = train_here(config, "--load", str(plain.checkpoint), "--max-steps", "3")
    before, after = tensors(plain.checkpoint), tensors(first.checkpoint)
    decay = min(0.9, 4 / 13)  # update number 3
    for name in ("img_in.weight", "final_layer.linear.bias"):
        expected = decay * before[f"model.{name}"] + (1 - decay) * after[f"model.{name}"]
        torch.testing.assert_close(after[f"ema.{name}"], expected, rtol=0, atol=1e-6)


def test_slots_per_step_stay_those_of_the_first_launch(tmp_path: Path, clips: Path) -> None:
    config = write_config(tmp_path, clips, slots_per_step=None, accumulation_steps=4)
    first, _ = train_here(config, "--max-steps", "2")
    assert state_of(first.checkpoint)["slots_per_step"] == 4
    second, _ = train_here(first.folder, "--accumulation-steps", "1", "--max-steps", "3")
    assert state_of(second.checkpoint)["slots_per_step"] == 4
    third, _ = train_here(first.folder, "--slots-per-step", "2", "--max-steps", "4")
    assert state_of(third.checkpoint)["slots_per_step"] == 2


def test_a_refused_change_leaves_the_run_as_it_was(config: Path) -> None:
    first, _ = train_here(config, "--max-steps", "2")
    saved = (first.folder / "config.py").read_text(encoding="utf-8")
    for flag, value, says in (
        ("--seed", "8", "seed is 8"),
        ("--model.depth", "2", "has no "),
        ("--bucket_config.32px.12", "(1.0, 1)", "12 frames"),
    ):
        with pytest.raises(UserError, match=says):
            train_here(first.folder, flag, value, "--max-steps", "3")
    assert (first.folder / "config.py").read_text(encoding="utf-8") == saved
    train_here(first.folder, "--max-steps", "3")  # what was refused has not stayed behind


@pytest.fixture
def damaged(config: Path) -> Path:
    """A run whose checkpoint has one flipped byte."""
    outcome, _ = train_here(config, "--max-steps", "1")
    file = sorted(outcome.checkpoint.glob("*.safetensors"))[0]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return outcome.checkpoint


def test_a_damaged_checkpoint_is_named_and_nothing_is_made(config: Path, damaged: Path) -> None:
    with pytest.raises(UserError, match=re.escape(f"{damaged}: is damaged")):
        train_here(config, "--load", str(damaged))
    assert [path.name for path in damaged.parent.parent.iterdir()] == ["tiny"]
