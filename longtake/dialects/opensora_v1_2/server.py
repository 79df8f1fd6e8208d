"""The inference server of Lambda's tutorial in its own words, as a command line of `longtake watch`."""

from __future__ import annotations

import argparse
import glob
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from longtake.contracts import UserError


class _Videos(NamedTuple):
    num_frames: int
    resolution: str
    batch_size: int


PRESETS = {"low4s": _Videos(102, "360p", 8), "low16s": _Videos(408, "360p", 2), "high4s": _Videos(102, "720p", 2)}
PROMPTS = "samples/prompts.txt"
_PLACES = ("outputs_speedrun", "outputs")


def watch_words(words: Sequence[str]) -> list[str]:
    """`--expnums 656 --preset low4s ...` -> the words behind `longtake`. Raises `UserError` for runs that are not
    there; flags that are none end the process as argparse does."""
    parser = argparse.ArgumentParser("inference-server.py", description=__doc__)
    parser.add_argument("--expnums", nargs="+", required=True, help="numbers of runs, or a file of them")
    parser.add_argument("--preset", choices=PRESETS, default="low4s")
    parser.add_argument("--compute_only", action="store_true", help="nothing goes to Weights & Biases")
    parser.add_argument("--last_step", action="store_true", help="the newest checkpoint of each run alone")
    parser.add_argument("--only-first-of-epoch", action="store_true", help="the first checkpoint of each pass alone")
    parser.add_argument("--save_to", help="the W&B run that gets the videos, or `new`; default: the run's own")
    given = parser.parse_args(list(words))
    size = PRESETS[given.preset]
    keys = {
        "prompts": PROMPTS,
        "ema": "False",  # as in the tutorial
        "batch_size": size.batch_size,
        "sampling_option.num_frames": size.num_frames,
        "sampling_option.resolution": size.resolution,
        "sampling_option.aspect_ratio": "9:16",
        "sampling_option.num_steps": 30,
        "sampling_option.guidance": 7.0,
    }
    found = ["watch", *(str(run) for run in _runs(given.expnums)), "--every", "60"]
    found += ["--pick", "last"] if given.last_step else []
    found += ["--pick", "first-of-pass"] if given.only_first_of_epoch and not given.last_step else []
    found += ["--wandb-run", given.save_to] if given.save_to else []
    found += [word for key, value in keys.items() for word in (f"--validation.{key}", str(value))]
    return [*found, "--wandb", "False" if given.compute_only else "True"]


def _runs(numbers: Sequence[str]) -> list[Path]:
    if len(numbers) == 1 and Path(numbers[0]).is_file():
        numbers = Path(numbers[0]).read_text("utf-8").split()
    found = []
    for number in numbers:
        if not number.isdigit():
            raise UserError(f"--expnums {number}: is no number of a run; write 656 for outputs/656-STDiT3-XL-2")
        names = [f"{place}/{number.zfill(3)}-*" for place in _PLACES]
        if not (there := [Path(path) for name in names for path in sorted(glob.glob(name))]):
            raise UserError(f"--expnums {number}: there is no {' and no '.join(names)}; call it where the runs are")
        found.append(there[0])
    return found
