"""Groups of parameters: which ones share a learning rate and a decay."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain

from torch import nn

from longtake.contracts import UserError
from longtake.train.config import RunConfig
from longtake.train.optimizer.config import OTHERS, GroupConfig
from longtake.train.optimizer.schedule import learning_rate

_SHOWN = 3


@dataclass(frozen=True)
class ParameterGroup:
    """One of them."""

    name: str
    config: GroupConfig | None  # None: of the parameters that no other has
    names: tuple[str, ...]
    weight_decay: float  # of those that decay

    def __str__(self) -> str:
        patterns = "no other group has" if self.config is None else "match " + ", ".join(self.config.match)
        return f"learning rate of {self.name}: {len(self.names)} tensors that {patterns}"

    def rate(self, config: RunConfig, step: int) -> float:
        """Its learning rate at optimizer step `step` (from 0)."""
        return learning_rate(config, step, self.config)


def groups_of(model: nn.Module, config: RunConfig) -> tuple[ParameterGroup, ...]:
    """Return the groups of a run: the parameters that no pattern matches, then those of `optim.groups`.

    A group of which nothing trains, as under adapters, is left out. Raises `UserError` for one that the model has no
    parameter for, or whose parameters the groups before it have.
    """
    optim, found = config.optim, []
    left = [name for name, p in model.named_parameters() if p.requires_grad]
    trained = set(left)
    every = [name for name, _ in chain(model.named_parameters(), model.named_buffers())]  # quantised ones are buffers
    for number, group in enumerate(optim.groups):
        fitting = {name for name in every if any(fnmatchcase(name, pattern) for pattern in group.match)}
        names = tuple(name for name in left if name in fitting)
        if not fitting or (not names and fitting & trained):
            shown = ", ".join(left[:_SHOWN])
            raise UserError(
                f"optim.groups[{number}].match = {list(group.match)}: fits no name of a parameter that is in no group "
                f"before it; names are such as {shown or 'none: the groups before it have all'}"
            )
        left = [name for name in left if name not in fitting]
        decay = optim.weight_decay if group.weight_decay is None else group.weight_decay
        if names:
            found.append(ParameterGroup(optim.group_names[number + 1], group, names, decay))
    return ParameterGroup(OTHERS, None, tuple(left), optim.weight_decay), *found
