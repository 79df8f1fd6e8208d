"""The systems that a demo can be of, by the run files in `presets/demo`, and the videos that each makes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from longtake import presets
from longtake.contracts import UserError
from longtake.data.shapes import COLOURS, split_prompts
from longtake.generate.sample import shape_asked
from longtake.system.config import SamplingOption
from longtake.train import RunConfig

FOLDER = presets.FOLDER / "demo"
HELD_BACK = "magenta"  # the colour that a run is not shown, where adapters learn it later
_ADAPTERS = "_lora"


@dataclass(frozen=True)
class DemoSystem:
    """A system: `NAME.py` trains on the shapes, `NAME_lora.py`, where there is one, adapters on a colour held back."""

    name: str
    run: Path
    adapters: Path | None

    @property
    def held_back(self) -> str | None:
        """The colour that the run is not shown."""
        return None if self.adapters is None else HELD_BACK


@dataclass(frozen=True)
class DemoKind:
    """Videos that a demo makes and judges together."""

    name: str
    title: str
    prompts: Sequence[str]
    num_shown: int  # in the report
    num_frames: int
    aspect_ratio: str


def demo_system(name: str) -> DemoSystem:
    """The system of a name. Raises `UserError` where there is none."""
    names = [path.stem for path in sorted(FOLDER.glob("*.py")) if not path.stem.endswith(_ADAPTERS)]
    if name not in names:
        raise UserError(f"--system {name}: there is no such demo; choose {' or '.join(names)}")
    adapters = FOLDER / f"{name}{_ADAPTERS}.py"
    return DemoSystem(name, FOLDER / f"{name}.py", adapters if adapters.exists() else None)


def has_several_buckets(config: RunConfig) -> bool:
    """Whether a run trains clips of several lengths; one that does not is shown square, short clips alone."""
    return sum(map(len, config.bucket_config.values())) > 1


def kinds(config: RunConfig, held_back: str | None = None) -> list[DemoKind]:
    """What is generated: the main bucket first, then every other bucket, then what training never showed."""
    seen, unseen = ([line for line in lines if held_back not in line.split()] for lines in split_prompts())
    option = SamplingOption(**config.sampling_option.model_dump(exclude_none=True))
    frames, height, width = shape_asked(config, option)
    size, own = f"{height} x {width}", (frames, option.aspect_ratio)
    main = DemoKind("main", f"Main bucket: {size}, {frames} frames", seen, 24, *own)
    heldout = DemoKind("heldout", f"Held out: {size}, {frames} frames", unseen, 12, *own)
    if not has_several_buckets(config):
        return [main, heldout]
    stills = [f"a {colour} circle" for colour in COLOURS]
    return [
        main,
        DemoKind("wide", "Wide: 40 x 24, 8 frames", seen, 6, 8, "2:1"),
        DemoKind("long", "Long: 32 x 32, 16 frames", seen, 6, 16, "1:1"),
        DemoKind("wide_long", "Wide and long: 40 x 24, 16 frames", seen, 6, 16, "2:1"),
        heldout,
        DemoKind("heldout_long", "Held out: 32 x 32, 16 frames", unseen, 6, 16, "1:1"),
        DemoKind("stills", "Stills: 32 x 32", stills, 6, 1, "1:1"),
    ]
