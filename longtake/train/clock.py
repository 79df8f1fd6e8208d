"""The clock of a run: one step counter that drives everything, and what is counted beside it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from longtake.contracts import UserError


@dataclass(frozen=True)
class Clock:
    """Where a run is. `global_step` drives learning rate, EMA and folder names."""

    global_step: int = 0  # optimizer updates made
    pass_index: int = 0  # passes through the data finished, also the number of the pass under way
    samples: int = 0  # samples seen, fillers not counted
    tokens: int = 0  # video tokens of those samples

    def tick(self, pass_index: int, samples: int, tokens: int) -> Clock:
        """The clock after one more step of pass `pass_index`."""
        return replace(
            self,
            global_step=self.global_step + 1,
            pass_index=pass_index,
            samples=self.samples + samples,
            tokens=self.tokens + tokens,
        )

    def to_json(self) -> dict[str, int]:
        """As a plain dict for `run.json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, int]) -> Clock:
        """Back from `run.json`. Raises `UserError` where a field is missing or not a number."""
        try:
            return cls(**{name: int(data[name]) for name in cls.__dataclass_fields__})
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"run.json: clock = {data!r}: expected {', '.join(cls.__dataclass_fields__)}") from error
