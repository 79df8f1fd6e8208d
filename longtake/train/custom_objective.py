"""A user's objective in place of the config's: named in checkpoints, and required by a resume."""

from __future__ import annotations

import hashlib
import inspect
from pathlib import Path

from longtake.checkpoint.state import CustomObjective, RunState
from longtake.contracts import UserError
from longtake.diffusion.objective import Objective
from longtake.train.config import RunConfig


def describe_objective(objective: type[Objective] | None, config: RunConfig) -> CustomObjective | None:
    """Return the record of an objective for checkpoints; None for the config's own.

    Raises `UserError` for what is not a subclass of `Objective`, for an abstract one, for one whose source cannot be
    read, and for a run of two denoisers, whose times are parts of the config's own objective.
    """
    if objective is None:
        return None
    if not (isinstance(objective, type) and issubclass(objective, Objective)):
        raise UserError(
            f"objective = {objective!r}: expected a subclass of longtake.diffusion.objective.Objective; pass "
            "the class itself, written as in docs/python.md"
        )
    name = f"{objective.__module__}.{objective.__qualname__}"
    if inspect.isabstract(objective):
        lacking = ", ".join(sorted(objective.__abstractmethods__))
        raise UserError(f"objective = {name}: expected a class without abstract methods; define {lacking}")
    if config.low_noise is not None:
        raise UserError(f"objective = {name}: expected a run of one denoiser, found two (low_noise); leave one out")
    return CustomObjective(name, hashlib.sha256(_source(objective, name).encode()).hexdigest())


def _source(objective: type[Objective], name: str) -> str:
    """Return the text of the class; in a notebook, where that is not found, the text of its methods."""
    try:
        return inspect.getsource(objective)
    except (OSError, TypeError):
        methods = [value for value in vars(objective).values() if inspect.isfunction(value)]
    try:
        return "\n".join(map(inspect.getsource, methods))
    except (OSError, TypeError):
        raise UserError(
            f"objective = {name}: its source cannot be read, and checkpoints record it; define the class in a file"
        ) from None


def check_resumed(checkpoint: Path, given: CustomObjective | None) -> None:
    """Raise `UserError` where the run of a checkpoint that is continued was trained with another objective."""
    saved = RunState.read(checkpoint).objective
    if saved == given:
        return
    fix = "start a run of its own from the checkpoint with --load"
    if saved is None:
        assert given is not None, "both None are equal"
        raise UserError(f"objective = {given.name}: expected that of the config, as {checkpoint} has; {fix}")
    found = "none" if given is None else given.name
    if given is not None and given.name == saved.name:
        found += " with another source"
    raise UserError(
        f"objective = {found}: expected {saved.name}, with which {checkpoint} was trained; call "
        f"Run.train(objective={saved.name.rpartition('.')[2]}), or {fix}"
    )
