from __future__ import annotations

import pytest
import torch

from longtake.contracts import Conditions
from longtake.diffusion import DropoutConfig, drop_text
from tests.diffusion.golden import read_tensors

CONDITIONS = Conditions(text=torch.ones(4, 3, 2), vector=torch.ones(4, 5), fps=torch.arange(4.0))
EMPTY = Conditions(text=torch.zeros(1, 3, 2), vector=torch.zeros(1, 5))


def test_dropped_rows_equal_the_reference() -> None:
    golden, info = read_tensors("losses")
    uniforms = torch.stack([golden["drop.uniform"], torch.ones(16)], 1)
    conditions, empty = Conditions(text=golden["drop.txt"]), Conditions(text=golden["drop.null"])
    dropped = drop_text(conditions, empty, uniforms, (info["drop_prob"], 0.0))
    assert torch.equal(dropped.text, golden["drop.out"])


def test_sequence_and_vector_are_dropped_each_on_its_own() -> None:
    uniforms = torch.tensor([[0.0, 0.0], [0.0, 0.9], [0.9, 0.0], [0.5, 0.25]])
    dropped = drop_text(CONDITIONS, EMPTY, uniforms, (0.5, 0.25))
    assert dropped.text[:, 0, 0].tolist() == [0, 0, 1, 1]  # a uniform equal to the ratio keeps the text
    assert dropped.vector[:, 0].tolist() == [0, 1, 0, 1]
    assert torch.equal(dropped.fps, CONDITIONS.fps)


def test_a_ratio_of_one_drops_all_and_of_zero_none() -> None:
    uniforms = torch.rand(4, 2, generator=torch.Generator().manual_seed(0))
    dropped = drop_text(CONDITIONS, EMPTY, uniforms, DropoutConfig(t5=1.0, clip=0.0).ratios)
    assert not dropped.text.any()
    assert dropped.vector.all()


def test_an_empty_prompt_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the empty prompt has shape \(2, 2\) where the texts have \(3, 2\)"):
        drop_text(CONDITIONS, Conditions(text=torch.zeros(1, 2, 2)), torch.zeros(4, 2), (0.5, 0.0))
