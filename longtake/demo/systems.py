"""The systems that a demo can be of, by the run files in `presets/demo`, and the videos that each makes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from longtake import presets
from longtake.contracts import UserError
from longtake.data.shapes import COLOURS, FPS, split_prompts
from longtake.data.stories import split_stories
from longtake.generate.sample import shape_asked
from longtake.system.config import SamplingOption
from longtake.train.config import RunConfig
from longtake.train.run_file import read_curriculum

FOLDER = presets.FOLDER / "demo"
HELD_BACK = "magenta"  # the colour that a run is not shown, where adapters learn it later
_ADAPTERS = "_lora"
_SHARE = 0.45  # of the files are wide, and as many long, where a run trains several lengths


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


@dataclass(frozen=True)
class GivenCase:
    """Frames of a clip that training has not seen, from which videos go on."""

    name: str
    title: str
    part: str  # of the demo
    cond_type: str | None = None  # None: the kind that takes the first frame alone
    stills: Sequence[int] = ()  # frames of the clip that are given as stills
    beginning: int = 0  # as many of its first frames are given as a clip
    made: tuple[int, int | None] = (0, None)  # frames of the video, from and to, in which a direction is looked for


FIRST_FRAME = GivenCase("from_stills", "From a still", "go on from stills", stills=(0,))
BY_STRATEGY = (  # of families that read mask strategies
    replace(FIRST_FRAME, cond_type="0", made=(1, None)),
    GivenCase(
        "between_stills", "Between two stills", "go between stills", "0;0,1,0,-1,1", stills=(0, -1), made=(1, -1)
    ),
    GivenCase("from_clips", "From a clip", "go on from clips", "0,0,-2,0,2", beginning=2, made=(2, None)),
)


def given_frames(config: RunConfig) -> Sequence[GivenCase]:
    """What a run that was trained with given frames is shown with."""
    if config.condition_config is None:
        return ()
    found = [given for given in BY_STRATEGY if config.family.has_kind(given.cond_type, config.model)]
    return found or (FIRST_FRAME,)


def system_names() -> list[str]:
    """Return the systems that have a demo."""
    runs = (one.path for one in presets.presets() if one.path.parent == FOLDER)
    return [path.stem for path in runs if not path.stem.endswith(_ADAPTERS)]


def about(name: str) -> str:
    """What a demo's run says of itself."""
    return next(one.about for one in presets.presets() if one.path == FOLDER / f"{name}.py")


def demo_system(name: str) -> DemoSystem:
    """Return the system of a name. Raises `UserError` where there is none."""
    if name not in (names := system_names()):
        raise UserError(f"--system {name}: there is no such demo; choose {' or '.join(names)}, or all")
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


def looks(config: RunConfig) -> dict[str, Any]:
    """What the clips of a run look like, as `make_shapes` is told.

    Shots for families that read mask strategies. Their attention over time knows distances alone, and cannot tell the
    first frame of pure noise from the last: in videos from text a shape moved as often against its prompt as with it.
    """
    share = _SHARE if has_several_buckets(config) else 0.0
    is_shot = any(given.cond_type for given in given_frames(config))
    shot = 1 + (config.sampling_option.num_frames or 0) if is_shot else 0  # their buckets ask for a frame more
    return {"wide": share, "long": share, "every": round(FPS / config.fps_save), "shot": shot}


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
