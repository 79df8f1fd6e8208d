"""The systems that a demo can be of, by the run files in `presets/demo`, and the videos that each makes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from longtake import presets
from longtake.contracts import UserError
from longtake.data.shapes import COLOURS, split_prompts
from longtake.data.stories import split_stories
from longtake.generate.sample import shape_asked
from longtake.system.config import SamplingOption
from longtake.train import RunConfig
from longtake.train.stages import read_curriculum

FOLDER = presets.FOLDER / "demo"
HELD_BACK = "magenta"  # the colour that a run is not shown, where adapters learn it later
_ADAPTERS = "_lora"


@dataclass(frozen=True)
class DemoSystem:
    """A system: `NAME.py` trains on the shapes, `NAME_lora.py`, where there is one, adapters on a colour held back."""

    name: str
    run: Path
    adapters: Path | None
    stages: tuple[str, ...] = ()  # of a curriculum of stories

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
    runs = (one.path for one in presets.presets() if one.path.parent == FOLDER)
    names = [path.stem for path in runs if not path.stem.endswith(_ADAPTERS)]
    if name not in names:
        raise UserError(f"--system {name}: there is no such demo; choose {' or '.join(names)}")
    adapters = FOLDER / f"{name}{_ADAPTERS}.py"
    run = FOLDER / f"{name}.py"
    curriculum = read_curriculum(str(run))
    stages = () if curriculum is None else tuple(stage.name for stage in curriculum.stages)
    return DemoSystem(name, run, adapters if adapters.exists() else None, stages)


def stories(config: RunConfig) -> list[DemoKind]:
    """What is generated of stories, none of which is trained on: the shape always there, and gone for one scene."""
    option = SamplingOption(**config.sampling_option.model_dump(exclude_none=True))
    frames, height, width = shape_asked(config, option)
    own, (_, told, _, gone) = (frames, option.aspect_ratio), split_stories()
    return [
        DemoKind(name, f"{title}: {height} x {width}, {frames} frames", list(map(json.dumps, asked)), 12, *own)
        for name, title, asked in (
            ("told", "Three scenes", told),
            ("gone", "Gone for the second", gone),
        )
    ]


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
