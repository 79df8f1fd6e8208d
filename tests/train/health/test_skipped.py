"""Steps that are left out: on the device and on the host alike, without a trace in weights, averages or checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from longtake.train import loop
from longtake.train.health.left_out import SkippedSteps
from longtake.train.sums import StepSums
from tests.train.runs import assert_same_bits, exact, metrics, state_of, steps_saved, train_here, write_config


@pytest.mark.parametrize(
    ("losses", "square", "left_out"),
    [
        ((1.0, 2.0), 4.0, False),
        ((1.0, float("nan")), 4.0, True),
        ((1.0, 2.0), float("inf"), True),
        ((1.0, 2.0), float("nan"), True),
        ((1.0, 2.0), 9.0, False),
        ((1.0, 2.0), 9.001, True),
    ],
)
def test_device_and_host_judge_alike(losses: tuple[float, ...], square: float, left_out: bool) -> None:
    skipped = SkippedSteps(norm_limit=3.0, most_in_a_row=1)
    sums = StepSums(torch.tensor([*losses, 1.0, 1.0, 2.0, square, 0.0]), len(losses))
    assert skipped.judge(sums).item() == float(left_out)
    assert skipped.take(losses, square) is not left_out


def test_it_is_too_many_after_more_than_so_many_in_a_row() -> None:
    skipped = SkippedSteps(norm_limit=None, most_in_a_row=2)
    for value in (float("nan"), float("nan"), 1.0, float("nan"), float("nan")):
        skipped.take([value], 1.0)
        assert not skipped.too_many
    skipped.take([float("inf")], 1.0)
    assert skipped.too_many
    assert skipped.total == 5


def spoil(steps: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss and gradient of these steps are not finite."""
    forward_backward = loop.Trainer.forward_backward

    def spoilt(self: loop.Trainer, *args: object) -> StepSums:
        sums = forward_backward(self, *args)
        if self.clock.global_step + 1 in steps:
            for p in self.updates[0].optimizer.parameters.values():
                p.grad.fill_(float("nan"))
            sums.losses[0] = float("nan")
            sums.grad_square.fill_(float("nan"))
        return sums

    monkeypatch.setattr(loop.Trainer, "forward_backward", spoilt)


def test_a_step_that_is_not_finite_is_left_out_and_its_clips_are_named(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil({3}, monkeypatch)
    outcome, _ = train_here(config, "--ckpt-every", "1", "--max-steps", "5")
    lines = metrics(outcome.folder)
    assert [line["step"] for line in lines if line.get("skipped")] == [3]
    assert lines[2]["clips"]
    assert all(len(clip) == 16 for clip in lines[2]["clips"])
    assert steps_saved(outcome.folder) == [1, 2, 4, 5]  # in the middle of such steps nothing is saved
    assert state_of(outcome.checkpoint)["skipped_steps"] == 1


def test_a_step_that_is_left_out_changes_nothing(tmp_path: Path, clips: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"max_steps": 2, "ema_decay": None}
    without = train_here(write_config(tmp_path / "a", clips, **settings))[0]
    spoil({3}, monkeypatch)
    left_out = train_here(write_config(tmp_path / "b", clips, **settings | {"max_steps": 3}))[0]
    assert_same_bits(without.checkpoint, left_out.checkpoint)


@pytest.mark.slow
def test_a_run_that_left_out_a_step_goes_on_as_if_it_had_not_been_stopped(
    tmp_path: Path, clips: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil({2}, monkeypatch)
    whole = train_here(write_config(tmp_path / "a", clips, max_steps=6))[0]
    config = write_config(tmp_path / "b", clips, max_steps=6)
    train_here(config, "--max-steps", "4")
    resumed = train_here(config, "--resume", "auto")[0]
    assert exact(resumed.folder) == exact(whole.folder)
    assert_same_bits(resumed.checkpoint, whole.checkpoint)


def test_an_abnormal_gradient_norm_is_left_out(config: Path) -> None:
    outcome, _ = train_here(config, "--max-steps", "2")
    norms = [line["grad_norm"] for line in metrics(outcome.folder)]
    limit = (norms[0] + norms[1]) / 2
    outcome, _ = train_here(config, "--max-steps", "2", "--skip-grad-norm", str(limit), "--exp-name", "limited")
    line = metrics(outcome.folder)[0 if norms[0] > limit else 1]
    assert line["skipped"]
