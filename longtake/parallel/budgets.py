"""How much recomputed blocks keep: by one budget, or the last of each list by a larger one than the others.

A budget is a share, 0 to 1, of what attention and linear layers put out; at 0 what attention gives is kept and no more.
Below all of them lies `INPUTS`. Configs, files and words call these two by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

INPUTS = -1.0  # the level at which blocks keep their inputs alone
_NAMES = {INPUTS: "inputs", 0.0: "attention"}


@dataclass(frozen=True)
class Split:
    """Two budgets of one micro-batch.

    The larger one is for the last blocks: what these keep is freed first in backward, before gradients have gathered,
    so that a step's peak is never higher than with the first ones.
    """

    most: float
    least: float
    last: tuple[int, ...]  # of the recomputed blocks of each list, how many keep by `most`, counted from its end


Budget = float | Split


def as_level(budget: float | str) -> float:
    """The level that a name stands for; a number is its own."""
    return {name: level for level, name in _NAMES.items()}.get(budget, budget)


def level_name(level: float) -> float | str:
    """What configs and files call it: the two lowest by name, any other by its number."""
    return _NAMES.get(level, level)


def level_words(level: float) -> str:
    """The same in a sentence."""
    name = level_name(level)
    return name if isinstance(name, str) else f"{name:g}"


def budget_of(budget: Budget, list_index: int, behind: int) -> float:
    """Of one recomputed block: of the model's list with this index, with so many recomputed ones of it behind it."""
    if isinstance(budget, Split):
        return budget.most if behind < budget.last[list_index] else budget.least
    return budget


def levels_of(budgets: Iterable[Budget]) -> list[float]:
    """The budgets that blocks have among these, in order."""
    found = set()
    for budget in budgets:
        found |= {budget.most, budget.least} if isinstance(budget, Split) else {budget}
    return sorted(found)


def used_levels(budget: Budget, counts: Sequence[int]) -> set[tuple[int, float]]:
    """The pairs (index of a list, budget) that occur where `counts[i]` blocks of list i are recomputed."""
    return {(i, budget_of(budget, i, behind)) for i, count in enumerate(counts) for behind in range(count)}


def budget_json(budget: Budget) -> float | str | dict[str, Any]:
    """As plain data."""
    if isinstance(budget, Split):
        return {"most": level_name(budget.most), "least": level_name(budget.least), "last": list(budget.last)}
    return level_name(budget)


def read_budget(data: float | str | Mapping[str, Any]) -> Budget:
    """What `budget_json` has written, or did before it wrote names: of then a number 0 meant inputs alone."""
    if isinstance(data, Mapping):
        return Split(_read_level(data["most"]), _read_level(data["least"]), tuple(data["last"]))
    return _read_level(data)


def _read_level(data: float | str) -> float:
    return INPUTS if data == 0 else as_level(data)


def list_name(blocks: str) -> str:
    """What a list of blocks is called beside the word "blocks": "double_blocks" -> "double"."""
    return blocks.removesuffix("blocks").rstrip("_")


def budgets_words(budgets: Mapping[str, Budget], lists: Sequence[str]) -> str:
    """What recomputed blocks keep, the most first: `budgets` by the name of their entries, `lists` of a model's
    blocks."""
    kinds = " + ".join(map(list_name, lists))
    groups: dict[tuple[float, float], list[str]] = {}
    for name, budget in budgets.items():
        ends = (budget.least, budget.most) if isinstance(budget, Split) else (budget, budget)
        count = f"{' + '.join(map(str, budget.last))} for " if isinstance(budget, Split) else ""
        groups.setdefault(ends, []).append(count + name)
    said = []
    for (least, most), names in sorted(groups.items(), reverse=True):
        shares = f"{level_words(most)} for all blocks of"
        if least < most:
            shares = f"{level_words(most)} for the last {kinds} blocks and {level_words(least)} for those before:"
            shares = shares.replace("  ", " ")
        said.append(f"{shares} {', '.join(names)}")
    return f"kept outputs of recomputed blocks (grad_ckpt_budget): {'; '.join(said)}"
