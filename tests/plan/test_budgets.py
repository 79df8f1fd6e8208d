"""What is kept by a budget that is left to the plan."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest

from longtake.models import MMDiTConfig
from longtake.parallel import INPUTS, Budget, Split, budget_json, budget_of, budgets_words, levels_of, read_budget
from longtake.plan import Layout, MicroBatch, forecast_memory
from longtake.plan.budgets import budget_levels, fill_budget
from longtake.plan.memory import placed_blocks

CONFIG = MMDiTConfig(in_channels=64, depth=3, depth_single_blocks=5)
BATCH = MicroBatch(32, (16, 17, 32, 32), 64)
AGAIN = Layout(shard=64, remat=(100, 4))


def needed(budget: Budget) -> int:
    return forecast_memory(CONFIG, BATCH, replace(AGAIN, budget=budget), error=0.1).total


def filled(room: int) -> Budget:
    return fill_budget(CONFIG, replace(AGAIN, room=room), needed)


def kept(budget: Budget) -> float:
    return sum(one.kept for one in placed_blocks(CONFIG, BATCH, replace(AGAIN, budget=budget)) if one.again)


def test_memory_is_filled_to_less_than_a_block_and_never_more() -> None:
    levels = budget_levels(CONFIG, 1)
    assert levels[:2] == (INPUTS, 0.0)
    assert (filled(0), filled(needed(1.0))) == (INPUTS, 1.0)
    assert [kept(filled(needed(level))) >= kept(level) for level in levels] == [True] * len(levels)
    least, most = needed(INPUTS), needed(1.0)
    own = max(needed(above) - needed(below) for below, above in pairwise(levels)) / 3
    found = []
    for part in range(1, 40):
        room = least + (most - least) * part // 40
        budget = filled(room)
        assert room - own <= needed(budget) <= room
        found.append(budget)
    splits = [budget for budget in found if isinstance(budget, Split)]
    assert len(set(splits)) > 12
    for split in splits:
        assert levels.index(split.most) == levels.index(split.least) + 1
        double, single = split.last
        assert 0 < double + single < 3 + 4
        assert double == 0 or single in (0, 4)  # one list alone has both
    assert [*map(kept, found)] == sorted(map(kept, found))


def test_the_last_blocks_keep_most_for_backward_frees_theirs_first() -> None:
    split = Split(1.0, 0.12, (0, 3))
    blocks = placed_blocks(CONFIG, BATCH, replace(AGAIN, budget=split))
    levels = {of: placed_blocks(CONFIG, BATCH, replace(AGAIN, budget=of)) for of in (0.12, 1.0)}
    assert [one.again for one in blocks] == [True] * 7 + [False]
    assert [one.held for one in blocks] == [levels[0.12][i].held if i < 4 else levels[1.0][i].held for i in range(8)]
    assert [budget_of(split, 1, behind) for behind in range(4)] == [1.0, 1.0, 1.0, 0.12]


@pytest.mark.parametrize("budget", [INPUTS, 0.0, 0.6, Split(1.0, 0.6, (3, 4)), Split(0.0, INPUTS, (0, 2))])
def test_a_budget_is_kept_as_plain_data(budget: Budget) -> None:
    assert read_budget(json.loads(json.dumps(budget_json(budget)))) == budget


def test_a_kept_0_is_of_before_attention_was_always_kept() -> None:
    assert read_budget(0.0) == INPUTS
    assert read_budget({"most": 0.01, "least": 0.0, "last": [0, 2]}) == Split(0.01, INPUTS, (0, 2))


def test_words_say_which_blocks_keep_what() -> None:
    budgets = {"256px/129f": Split(1.0, 0.6, (17, 38)), "768px/1f": Split(1.0, 0.6, (0, 21)), "256px/125f": 1.0}
    assert levels_of(budgets.values()) == [0.6, 1.0]
    assert budgets_words(budgets, ("double_blocks", "single_blocks")) == (
        "kept outputs of recomputed blocks (grad_ckpt_budget): 1 for all blocks of 256px/125f; 1 for the last "
        "double + single blocks and 0.6 for those before: 17 + 38 for 256px/129f, 0 + 21 for 768px/1f"
    )
    assert "for the last blocks and" in budgets_words({"480p/49f": Split(1.0, 0.6, (3,))}, ("blocks",))
    least = {"768px/129f": Split(0.0, INPUTS, (0, 5)), "768px/1f": INPUTS}
    assert budgets_words(least, ("double_blocks", "single_blocks")).endswith(
        ": attention for the last double + single blocks and inputs for those before: 0 + 5 for 768px/129f; inputs for "
        "all blocks of 768px/1f"
    )
