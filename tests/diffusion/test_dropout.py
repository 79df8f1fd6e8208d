from __future__ import annotations

import pytest
import torch

from longtake.contracts import Conditions
from longtake.diffusion.dropout import drop_text
from tests.diffusion.golden import read_tensors

CONDITIONS = Conditions(text=torch.ones(4, 3, 2), vector=torch.ones(4, 5), fps=torch.arange(4.0))
EMPTY = Conditions(text=torch.zeros(1, 3, 2), vector=torch.zeros(1, 5))


def test_dropped_rows_equal_the_reference() -> None:
    golden, info = read_tensors("losses")
    conditions, empty = Conditions(text=golden["drop.txt"]), Conditions(text=golden["drop.null"])
    dropped = drop_text(conditions, empty, {"text": golden["drop.uniform"]}, {"text": info["drop_prob"]})
    assert torch.equal(dropped["text"], golden["drop.out"])


def test_sequence_and_vector_are_dropped_each_on_its_own() -> None:
    uniforms = {"vector": torch.tensor([0.0, 0.9, 0.0, 0.25]), "text": torch.tensor([0.0, 0.0, 0.9, 0.5])}
    dropped = drop_text(CONDITIONS, EMPTY, uniforms, {"text": 0.5, "vector": 0.25})
    assert dropped["text"][:, 0, 0].tolist() == [0, 0, 1, 1]  # a uniform equal to the ratio keeps the text
    assert dropped["vector"][:, 0].tolist() == [0, 1, 0, 1]
    assert torch.equal(dropped["fps"], CONDITIONS["fps"])


def test_a_ratio_of_one_drops_all_and_of_zero_none() -> None:
    uniforms = {name: torch.tensor([0.0, 0.3, 0.6, 0.999]) for name in ("text", "vector")}
    dropped = drop_text(CONDITIONS, EMPTY, uniforms, {"text": 1.0, "vector": 0.0})
    assert not dropped["text"].any()
    assert dropped["vector"].all()


def test_an_empty_prompt_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"what stands for no text has shape \(2, 2\) where the texts have \(3, 2\)"):
        drop_text(CONDITIONS, Conditions(text=torch.zeros(1, 2, 2)), {"text": torch.zeros(4)}, {"text": 0.5})


@pytest.mark.parametrize("own_mask", [True, False])
def test_a_mask_goes_with_the_text_where_what_stands_for_none_has_one(own_mask: bool) -> None:
    masks = {"text": torch.tensor([[True, True, False]] * 2)}
    empty = {"text": torch.tensor([[True, False, False]])} if own_mask else {}
    conditions = Conditions({"text": torch.ones(2, 3, 2)}, masks)
    nothing = Conditions({"text": torch.zeros(1, 3, 2)}, empty)
    dropped = drop_text(conditions, nothing, {"text": torch.tensor([0.0, 0.9])}, {"text": 0.5})
    assert not dropped["text"][0].any()
    assert dropped.masks["text"].sum(1).tolist() == [1 if own_mask else 2, 2]
