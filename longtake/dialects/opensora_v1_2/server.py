"""The inference server of Lambda's tutorial with its own flags, as a command line of `longtake watch`."""

from __future__ import annotations

import argparse
import glob
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from longtake.contracts import UserError
from longtake.dialects.names import refuse_typos
from longtake.dialects.opensora_v1_2.tracking import NO_LOGIN, has_login
from longtake.train.config import RunConfig


class _Videos(NamedTuple):
    num_frames: int
    resolution: str
    batch_size: int


PRESETS = {"low4s": _Videos(102, "360p", 8), "low16s": _Videos(408, "360p", 2), "high4s": _Videos(102, "720p", 2)}
PROMPTS = "samples/prompts.txt"
WATCH_FLAGS = ("--once", "--every", "--device", "--metrics", "--on-alarm", "--webhook")
_PLACES = ("outputs_speedrun", "outputs")


def watch_words(arguments: Sequence[str]) -> list[str]:
    """`--expnums 656 --preset low4s ...` -> the arguments of `longtake`. Flags of `longtake watch` and keys of a run
    may follow, such as `--once` and `--validation.clips 16`. Raises `UserError` for runs that are not there and for
    mistyped flags."""
    parser = argparse.ArgumentParser("inference-server.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("--expnums", nargs="+", required=True, help="numbers of runs, or a file of them")
    parser.add_argument("--preset", choices=PRESETS, default="low4s")
    parser.add_argument("--compute_only", action="store_true", help="nothing goes to Weights & Biases")
    parser.add_argument(
        "--last_step", nargs="?", const="", metavar="STEP", help="the newest checkpoint of each run alone, up to STEP"
    )
    parser.add_argument("--only-first-of-epoch", action="store_true", help="the first checkpoint of each pass alone")
    parser.add_argument("--save_to", help="the W&B run that gets the videos, or `new`; default: the run's own")
    parser.add_argument("--tiny", action="store_true", help="videos of the run's own sizes, in four steps")
    given, others = parser.parse_known_args(list(arguments))
    known = [option.removeprefix("--") for action in parser._actions for option in action.option_strings]
    refuse_typos([word for word in others if word not in WATCH_FLAGS], known, "inference-server.py", RunConfig)
    if (stray := next(iter(others), "--")) and not stray.startswith("--"):
        raise UserError(f"inference-server.py: {stray!r} follows no flag that takes a value; leave it out")
    size = PRESETS[given.preset]
    keys: dict[str, object] = {
        "prompts": _prompts(),
        "ema": "False",  # as in the tutorial
        "sampling_option.num_steps": 4 if given.tiny else 30,
        "sampling_option.guidance": 7.0,
    }
    if not given.tiny:
        keys["batch_size"] = size.batch_size
        keys["sampling_option.num_frames"] = size.num_frames
        keys["sampling_option.resolution"] = size.resolution
        keys["sampling_option.aspect_ratio"] = "9:16"
    found = ["watch", *(str(run) for run in _runs(given.expnums)), "--every", "60"]
    if given.last_step is not None:
        found += ["--pick", f"last:{given.last_step}" if given.last_step else "last"]
    elif given.only_first_of_epoch:
        found += ["--pick", "first-of-pass"]
    found += ["--wandb-run", given.save_to] if given.save_to else []
    found += [word for key, value in keys.items() for word in (f"--validation.{key}", str(value))]
    is_tracked = not given.compute_only and (given.save_to is not None or has_login())
    if not is_tracked and not given.compute_only:
        print(f"inference-server.py: {NO_LOGIN}", file=sys.stderr)
    return [*found, "--wandb", str(is_tracked), *others]


def _prompts() -> str:
    """Return the prompts of this folder, else those that ship with the repository."""
    shipped = Path(__file__).parents[3] / PROMPTS
    return str(shipped) if shipped.is_file() and not Path(PROMPTS).exists() else PROMPTS


def _runs(numbers: Sequence[str]) -> list[Path]:
    if len(numbers) == 1 and Path(numbers[0]).is_file():
        numbers = Path(numbers[0]).read_text("utf-8").split()
    found = []
    for number in numbers:
        if not number.isdigit():
            raise UserError(f"--expnums {number}: is not the number of a run; write 656 for outputs/656-STDiT3-XL-2")
        names = [f"{place}/{number.zfill(3)}-*" for place in _PLACES]
        if not (there := [Path(path) for name in names for path in sorted(glob.glob(name))]):
            raise UserError(f"--expnums {number}: there is no {' and no '.join(names)}; call it where the runs are")
        found.append(there[0])
    return found
