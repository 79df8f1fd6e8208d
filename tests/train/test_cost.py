"""Where the constants of balancing come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from longtake.buckets.mix import CostModel
from longtake.checkpoint.folder import read_state
from longtake.contracts import UserError
from longtake.train.cost import cost_model
from longtake.train.run_file import read_run
from tests.train.runs import exact, train_here, write_config


def constants(folder: Path) -> tuple[float, ...]:
    cost = read_state(folder)["data"]["cost"]
    return cost["per_sample"], cost["linear"], cost["quadratic"]


def test_measured_constants_are_positive_and_stay_with_the_run(tmp_path: Path, clips: Path) -> None:
    config = write_config(tmp_path, clips, max_steps=3)
    begun, _ = train_here(config, "--dataset.cost", "measure")
    measured = constants(begun.checkpoint)
    assert min(measured) >= 0
    assert 0 < max(measured) < 60, "seconds of one tiny sample"
    ended, _ = train_here(begun.folder, "--max_steps", "5")
    assert constants(ended.checkpoint) == measured


def test_measuring_changes_nothing_but_the_order(tmp_path: Path, clips: Path) -> None:
    first, _ = train_here(write_config(tmp_path / "a", clips, max_steps=3), "--dataset.cost", "measure")
    a, b, c = constants(first.checkpoint)
    second, _ = train_here(write_config(tmp_path / "b", clips, max_steps=3), "--dataset.cost", f"({a}, {b}, {c})")
    assert exact(first.folder) == exact(second.folder)


def test_fewer_than_three_sizes_are_filled_up_with_stills(tmp_path: Path, clips: Path) -> None:
    buckets = {"32px": {8: (1.0, 3)}}
    begun, _ = train_here(
        write_config(tmp_path, clips, bucket_config=buckets, max_steps=1), "--dataset.cost", "measure"
    )
    assert max(constants(begun.checkpoint)) > 0


def test_a_run_that_is_to_repeat_itself_measures_nothing(config: Path) -> None:
    run = read_run(str(config), ["--dataset.cost", "measure", "--deterministic", "True"]).value
    kept = CostModel(1.0, 2.0, 3.0, run.ae.latent, run.model.patch[1], 4)
    assert cost_model(run, None, 4, {"cost": kept.to_json()}, None, None) == kept
    with pytest.raises(UserError, match="deterministic = True times nothing"):
        cost_model(run, None, 4, None, None, None)


def test_another_word_is_refused(tmp_path: Path, clips: Path) -> None:
    with pytest.raises(Exception, match="measure"):
        train_here(write_config(tmp_path, clips), "--dataset.cost", "guess")
