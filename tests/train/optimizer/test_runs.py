"""Runs whose states take a byte, live in host memory, or update bf16 weights: stopped and continued, steps left out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from longtake.contracts import UserError
from tests.train.health.test_skipped import spoil
from tests.train.optimizer.test_schedule import run_config
from tests.train.runs import assert_same_bits, exact, finish, start, tensors, train_here, write_config

WAYS: Mapping[str, Mapping[str, Any]] = {
    "8bit in host memory": {"optim": {"states": "8bit", "offload": True}, "ema_offload": True},
    "8bit bf16": {"optim": {"states": "8bit"}, "master_dtype": "bf16"},
}
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


@every_way
def test_a_run_goes_on_bit_by_bit(tmp_path: Path, clips: Path, way: Mapping[str, Any]) -> None:
    whole, _ = train_here(write_config(tmp_path / "a", clips, max_steps=5, **way))
    config = write_config(tmp_path / "b", clips, max_steps=5, **way)
    train_here(config, "--max-steps", "3")
    resumed, _ = train_here(config, "--resume", "auto")
    assert exact(resumed.folder) == exact(whole.folder)
    assert_same_bits(resumed.checkpoint, whole.checkpoint)
    saved = tensors(whole.checkpoint)
    assert {t.dtype for n, t in saved.items() if n.endswith(".codes")} == {torch.uint8}
    master = torch.bfloat16 if way.get("master_dtype") else torch.float32
    assert {t.dtype for n, t in saved.items() if n.startswith("model.")} == {master}
    assert {t.dtype for n, t in saved.items() if n.startswith("ema.")} == {torch.float32}


@pytest.mark.parametrize(
    "way", [pytest.param(WAYS["8bit in host memory"], marks=pytest.mark.slow), WAYS["8bit bf16"]], ids=WAYS
)
def test_a_step_that_is_left_out_changes_nothing_the_average_included(
    tmp_path: Path, clips: Path, monkeypatch: pytest.MonkeyPatch, way: Mapping[str, Any]
) -> None:
    without, _ = train_here(write_config(tmp_path / "a", clips, max_steps=2, **way))
    spoil({3}, monkeypatch)
    left_out, _ = train_here(write_config(tmp_path / "b", clips, max_steps=3, **way))
    assert_same_bits(without.checkpoint, left_out.checkpoint)


def test_moments_of_another_kind_are_refused_in_a_sentence(config: Path) -> None:
    outcome, _ = train_here(config, "--max-steps", "1")
    with pytest.raises(UserError, match=r"has no optim\..*exp_avg\.codes"):
        train_here(config, "--load", str(outcome.checkpoint), "--max-steps", "2", "--optim.states", "8bit")


def test_offloading_no_average_is_a_mistake() -> None:
    with pytest.raises(UserError, match=r"ema_offload = True: there is no EMA"):
        run_config(ema_offload=True)


@pytest.mark.slow
@every_way
def test_a_run_on_two_ranks_goes_on_bit_by_bit(tmp_path: Path, clips: Path, way: Mapping[str, Any]) -> None:
    last = []
    for name, stops in {"a": (5,), "b": (3, 5)}.items():
        config = write_config(tmp_path / name, clips, **way)
        for stop in stops:
            code, _, error = finish(start("train", config, "--max-steps", stop, "--resume", "auto", processes=2))
            assert code == 0, error
        last.append(next((tmp_path / name / "outputs" / "tiny").glob("epoch*-global_step5")))
    assert_same_bits(*last)
    assert exact(last[0].parent) == exact(last[1].parent)


def test_the_average_of_a_run_takes_each_steps_weights_at_the_decay_of_that_step(config: Path) -> None:
    saved = [tensors(train_here(config, "--max-steps", str(step))[0].checkpoint) for step in (1, 2)]
    name = "img_in.weight"
    before, after, weights = saved[0][f"ema.{name}"], saved[1][f"ema.{name}"], saved[1][f"model.{name}"]
    decay = (1 + 2) / (10 + 2)  # the ramp at step 2
    torch.testing.assert_close(after, decay * before + (1 - decay) * weights, rtol=1e-5, atol=1e-7)


def test_the_limit_on_the_norm_begins_higher(config: Path) -> None:
    flags = ("--max-steps", "3", "--eps", "1.0", "--grad-clip", "1e-3", "--lr", "1.0")
    found = {
        law: exact(train_here(config, *flags, *(() if law is None else ("--optim.clip", law)))[0].folder)
        for law in (None, "dict(start=1.0, abnormal=1e6)", "dict(start=5.0, steps=2)")
    }
    plain, same, higher = found.values()
    assert same == plain
    assert higher[0] == plain[0]  # the first loss is of the weights before
    assert higher[1:] != plain[1:]
