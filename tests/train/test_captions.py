"""The captions of a step go through a text encoder together, and each of them once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from longtake.encoders.text import T5Encoder
from longtake.plan.work import read_layout, read_work
from longtake.train import loop
from longtake.train.run_file import read_run
from tests.encoders.conftest import described
from tests.train.runs import assert_same_bits, train_here

__all__ = ["described"]


def passes_of_t5(
    config: Path, described: dict[str, Any], name: str, patch: pytest.MonkeyPatch
) -> tuple[list[int], Path]:
    """How many captions each pass had in a run of two steps of four micro-batches, and its checkpoint. None of them
    waits in more bytes than a plan says."""
    passes: list[int] = []
    embed = T5Encoder._embed
    ahead = T5Encoder.embed_ahead
    waiting: list[int] = []

    def weighed(encoder: T5Encoder, texts: Sequence[str]) -> None:
        ahead(encoder, texts)
        waiting.append(sum(row.nbytes for row in encoder._ahead.values()))

    def counted(encoder: T5Encoder, texts: Sequence[str]) -> Tensor:
        assert len(set(texts)) == len(texts)
        passes.append(len(texts))
        return embed(encoder, texts)

    t5 = [word for key, value in described["t5"].items() for word in (f"--t5.{key}", str(value))]
    width = ("--model.context_in_dim", str(described["t5"]["dim"]))
    with patch.context() as patched:
        patched.setattr(T5Encoder, "_embed", counted)
        patched.setattr(T5Encoder, "embed_ahead", weighed)
        outcome, _ = train_here(config, "--max_steps", "2", "--exp_name", name, *t5, *width)
    run = read_run(str(outcome.folder), []).value
    work, layout = read_work(run), read_layout(run, 1, 1)
    planned = [work.micro_batch(one, ahead=work.captions_ahead(one, layout)).waiting_bytes for one in work.entries]
    assert len(waiting) >= 2
    assert 0 < max(waiting) <= max(planned)
    return passes, outcome.checkpoint


def test_a_step_has_one_pass_of_its_captions_and_trains_as_with_one_for_each_micro_batch(
    config: Path, described: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    together, first = passes_of_t5(config, described, "together", monkeypatch)
    monkeypatch.setattr(loop, "CAPTIONS_AT_ONCE", 1)
    apart, second = passes_of_t5(config, described, "apart", monkeypatch)
    assert together[0] == apart[0] == 1  # what stands for no text
    assert (len(together), len(apart)) == (1 + 2, 1 + 2 * 4)
    assert max(together) <= 32
    assert sum(together) <= sum(apart)
    assert_same_bits(first, second)
