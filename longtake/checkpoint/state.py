"""What a checkpoint keeps of its run beside tensors: every field of `run.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, StringConstraints, TypeAdapter, ValidationError

from longtake.checkpoint.folder import read_state
from longtake.checkpoint.writer import STATE_FILE
from longtake.contracts import UserError

Count = Annotated[int, Field(ge=0, le=1 << 53)]
Frames = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]  # a number of frames as a key of JSON


@dataclass(frozen=True)
class Clock:
    """Where a run is. `global_step` drives learning rate, EMA and folder names."""

    global_step: Count = 0  # optimizer updates made
    pass_index: Count = 0  # passes through the data finished, also the number of the current pass
    samples: Count = 0  # samples seen, fillers not counted
    tokens: Count = 0  # video tokens of those samples

    def tick(self, pass_index: int, samples: int, tokens: int) -> Clock:
        """Return the clock after one more step of pass `pass_index`."""
        return replace(
            self,
            global_step=self.global_step + 1,
            pass_index=pass_index,
            samples=self.samples + samples,
            tokens=self.tokens + tokens,
        )


@dataclass(frozen=True)
class Samples:
    """A tally over the whole run."""

    tried: Count = 0  # samples of the steps made, fillers not counted
    lost: Count = 0  # those of them that could not be loaded


@dataclass(frozen=True)
class Frozen:
    """The tensors that a run does not train."""

    digest: str
    num_tensors: Count
    source: str | None  # the file that the model was filled from; None: `frozen/` in the run's folder holds them


@dataclass(frozen=True)
class CustomObjective:
    """An objective of the user's, in place of the config's."""

    name: str  # qualified, `package.module.Class`
    source_sha256: str  # of the class's source text


@dataclass(frozen=True)
class SlotSizes:
    """Micro-batches of a slot by resolution and number of frames, and what they follow from."""

    of: Any
    sizes: Mapping[str, Mapping[Frames, Annotated[int, Field(ge=1, le=1 << 16)]]]


@dataclass(frozen=True)
class RunState:
    """State of a run after a step."""

    clock: Clock
    data: dict[str, Any] | None = None  # the position in the data; None: the start of a pass
    config: str = ""  # the resolved run file
    name: str = ""  # of the run's folder
    slots_per_step: Annotated[int, Field(ge=1, le=1 << 16)] | None = None
    slot_sizes: SlotSizes | None = None
    frozen: Frozen | None = None  # None: all parameters train
    low_noise_frozen: Frozen | None = None  # the same of a second denoiser
    low_noise_updates: Count = 0  # optimizer updates of a second denoiser, skipped ones left out
    adapters: Mapping[str, float] = field(default_factory=dict)  # layer -> alpha / rank; `low_noise_` before a second's
    skipped_steps: Count = 0
    seconds: Mapping[str, float] = field(default_factory=dict)  # where time went
    samples: Samples = Samples()
    versions: Mapping[str, str] = field(default_factory=dict)
    choices: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # made by free memory or by FLOPs
    objective: CustomObjective | None = None  # None: the config's

    def frozen_of(self, prefix: str) -> Frozen | None:
        """Return the tensors that do not train of the first denoiser (""), or of the second (`folder.LOW_NOISE`)."""
        return self.low_noise_frozen if prefix else self.frozen

    @property
    def frozen_source(self) -> str | None:
        """The file under what was trained; None where there is none, or none is needed."""
        return None if self.frozen is None else self.frozen.source

    def to_json(self) -> dict[str, Any]:
        """As plain data for `save_checkpoint`."""
        return asdict(self)

    @classmethod
    def read(cls, folder: str | Path) -> RunState:
        """That of a checkpoint. Raises UserError as `read_state`, and where a field is not what it should be."""
        state = read_state(folder)
        try:
            return TypeAdapter(cls).validate_python(state)
        except ValidationError as error:
            fault = error.errors()[0]
            place = ".".join(str(part) for part in fault["loc"])
            found = "" if fault["type"] == "missing" else f" = {repr(fault['input'])[:60]}"
            raise UserError(
                f"{Path(folder) / STATE_FILE}: {place}{found}: {fault['msg']}; the checkpoint is not one of a run of "
                "this version, choose another one"
            ) from None
