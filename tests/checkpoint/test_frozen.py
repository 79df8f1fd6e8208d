"""Tensors that are not trained: written once or not at all, and recognised."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from longtake.checkpoint.frozen import keep_frozen, restore_frozen
from longtake.checkpoint.save import save_checkpoint
from longtake.checkpoint.state import Clock, RunState
from longtake.contracts import UserError
from longtake.system.export import export_weights


def frozen(value: float = 1.0) -> dict[str, Tensor]:
    return {"model.a": torch.full((3, 2), value), "model.b": torch.arange(4).bfloat16()}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path, 0, 1, {"model.trained": torch.ones(2)}, {})


def test_without_a_file_of_their_own_they_are_written_once_and_come_back(checkpoint: Path) -> None:
    facts = keep_frozen(checkpoint.parent, frozen(), None)
    changed = (checkpoint.parent / "frozen" / "COMPLETE").stat().st_mtime_ns
    assert keep_frozen(checkpoint.parent, frozen(), None) == facts
    assert (checkpoint.parent / "frozen" / "COMPLETE").stat().st_mtime_ns == changed
    into = {name: torch.zeros_like(tensor) for name, tensor in frozen().items()}
    restore_frozen(checkpoint, into, facts)
    assert all(torch.equal(into[name], tensor) for name, tensor in frozen().items())


def test_with_a_file_of_their_own_nothing_is_written(checkpoint: Path) -> None:
    facts = keep_frozen(checkpoint.parent, frozen(), "flux.safetensors")
    assert not (checkpoint.parent / "frozen").exists()
    restore_frozen(checkpoint, frozen(), facts)


def test_others_than_the_checkpoint_was_trained_on_are_refused(checkpoint: Path) -> None:
    facts = keep_frozen(checkpoint.parent, frozen(), "flux.safetensors")
    with pytest.raises(UserError, match=r"trained on frozen weights of digest .*flux.safetensors"):
        restore_frozen(checkpoint, frozen(2.0), facts)
    with pytest.raises(UserError, match="was made with 2 frozen tensors, the run has 0"):
        restore_frozen(checkpoint, {}, facts)
    with pytest.raises(UserError, match="was made with none, the run has 2"):
        restore_frozen(checkpoint, frozen(), None)


@pytest.mark.parametrize("source", [None, "flux.safetensors"])
def test_they_are_known_again_in_another_dtype(source: str | None, checkpoint: Path) -> None:
    kept = {"model.a": torch.randn(3, 2).bfloat16(), "model.codes": torch.arange(6, dtype=torch.uint8)}
    facts = keep_frozen(checkpoint.parent, kept, source)
    into = {"model.a": kept["model.a"].float(), "model.codes": kept["model.codes"].clone()}
    restore_frozen(checkpoint, into, facts)
    assert into["model.a"].dtype == torch.float32
    assert torch.equal(into["model.a"], kept["model.a"].float())


def test_a_tensor_that_was_not_frozen_before_is_named(checkpoint: Path) -> None:
    facts = keep_frozen(checkpoint.parent, frozen(), None)
    with pytest.raises(UserError, match=r"has no model.c \(1 lacking in all\); freeze the parameters the run was"):
        restore_frozen(checkpoint, {**frozen(), "model.c": torch.zeros(1)}, facts)


def test_a_run_folder_keeps_its_frozen_tensors(checkpoint: Path) -> None:
    keep_frozen(checkpoint.parent, frozen(), None)
    with pytest.raises(UserError, match=r"holds frozen weights of digest .*start a run of another name"):
        keep_frozen(checkpoint.parent, frozen(2.0), None)


@pytest.mark.parametrize("source", [None, "flux.safetensors"])
def test_an_export_is_whole_or_names_the_file_of_the_rest(source: str | None, tmp_path: Path) -> None:
    facts = keep_frozen(tmp_path, frozen(), source)
    path = save_checkpoint(tmp_path, 0, 1, {"model.trained": torch.ones(2)}, RunState(Clock(), frozen=facts).to_json())
    target = export_weights(path, tmp_path / "out.safetensors")
    assert load_file(target).keys() == ({"trained", "a", "b"} if source is None else {"trained"})
    with safe_open(target, framework="pt") as file:
        assert file.metadata().get("frozen_source") == source
