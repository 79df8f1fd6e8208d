"""The keys of a run as they are shown: values and where each comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longtake.config.load import Dialect, Row


@dataclass(frozen=True)
class ShownKeys:
    """Rows of `config show`, and a line on what bounds the autoencoder, where something does."""

    rows: tuple[Row, ...]
    ceiling: str | None


def shown_keys(source: str, overrides: Sequence[str], dialect: Dialect | None = None) -> ShownKeys:
    """Return the keys of a run file of training or generation, or of a run's folder. Raises `UserError`."""
    from longtake.config.load import describe
    from longtake.train.run_file import keys_of_generation, read_run

    path = Path(source)
    if path.is_file() and keys_of_generation(path, dialect):
        from longtake.generate.read import read_generation

        return ShownKeys(tuple(describe(read_generation(path, overrides, dialect))), None)
    from longtake.train.config import RunWithoutTable

    resolved = read_run(source, overrides, RunWithoutTable, dialect)
    idle = {"lr"} if resolved.value.optim.schedule is not None else set()  # nothing reads it then
    rows = tuple(row for row in describe(resolved) if row.key not in idle)
    return ShownKeys(rows, resolved.value.ae.ceiling)


def recorded_choices(source: str) -> tuple[Row, ...]:
    """Return the choices of a launch that the last checkpoint in a run's folder records; empty for other sources."""
    from longtake.checkpoint.runs import list_checkpoints
    from longtake.checkpoint.state import RunState
    from longtake.checkpoint.writer import STATE_FILE
    from longtake.config.load import Row

    whole = [info.path for info in list_checkpoints(source) if info.complete]
    if not whole:
        return ()
    state = RunState.read(whole[-1])
    place = str(whole[-1] / STATE_FILE)
    return tuple(Row(f"choices.{name}", dict(choice), place) for name, choice in state.choices.items())
