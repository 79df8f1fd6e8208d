"""What two stores may not differ in, and how a difference is said."""

from __future__ import annotations

import torch
from torch import nn

from longtake.encode.fit import differences, weights_digest
from longtake.encoders.word_vectors import WordEncoder


def test_every_difference_is_named_with_both_values() -> None:
    here = {"seed": 1, "ae": {"type": "pixel", "spatial": 8}, "views": 2}
    there = {"seed": 1, "ae": {"type": "pixel", "spatial": 16}, "stage": 0, "views": 3}
    assert differences(here, there) == [
        "ae.spatial is 8 here and 16 in the store",
        "views is 2 here and 3 in the store",
        "stage is nothing here and 0 in the store",
    ]
    assert differences(here, here) == []


def test_one_weight_changes_the_digest_of_an_encoder() -> None:
    module = nn.Linear(3, 2).bfloat16()
    before = weights_digest(module)
    assert before == weights_digest(module)
    with torch.no_grad():
        module.weight[1, 2] += 1
    assert before != weights_digest(module)
    assert weights_digest(WordEncoder(8, 4)) is None
