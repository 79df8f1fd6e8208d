"""What is run on a pretended GPU, in a process of its own: `python plays.py LIBRARY FOLDER` writes what was found out
into FOLDER/found.json."""

from __future__ import annotations

import ctypes
import sys

if __name__ == "__main__":
    ctypes.CDLL(sys.argv[1])  # before PyTorch

import dataclasses
import json
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch.nn import functional as F

from longtake.data.clips.video import write_image
from longtake.data.probing.probe import probe_table
from longtake.data.shapes import make_shapes
from longtake.generate.run import generate_from
from longtake.generate.source import resolve_source
from longtake.parallel.world import World, start_world
from longtake.train.optimizer import sharded
from longtake.train.run import train
from longtake.train.run_file import read_run
from tests.pretended.gpu import GPU, pretended_gpu, waits
from tests.train.runs import write_config

PRESET = Path(__file__).parents[2] / "configs" / "opensora_v2" / "inference" / "256px.py"
WIDER = ("--model.hidden_size", "64", "--model.axes_dim", "(8, 12, 12)")  # wide enough for blocks of 64
KNOWN = ("--model.cond_embed", "True", "--condition_config.t2v", "1", "--condition_config.i2v_loop", "3")
REMAT = (
    "--model.recompute",
    "selective",
    "--model.grad_ckpt_buffer_size",
    str(1 << 24),
)
BYTES = (*WIDER, "--optim.states", "8bit", "--optim.offload", "True", "--ema-offload", "True")
DORA = (*WIDER, "--lora.rank", "4", "--lora.alpha", "4", "--lora.dora", "True")
TRAINED = {
    "known frames": (*KNOWN, *REMAT, "--model.guidance_embed", "True", "--no_i2v_ref_loss", "True"),
    "offloaded bytes": (*BYTES, "--master_dtype", "bf16", "--grad-clip", "1.0"),
    "adapters on nf4": (*DORA, "--lora.base", "nf4"),
    "masters in host memory": ("--parallel.cpu_offload", "True", "--grad-clip", "1.0"),
}
ONCE = ("in save",)
MADE = {
    "text": (),
    "references in turn": (
        "--cond_type",
        "i2v_loop",
        "--ref",
        "{picture}",
        "--sampling_option.guidance_batch",
        "False",
    ),
}


def trained(folder: Path, world: World, table: Path, flags: tuple[str, ...]) -> None:
    """Two steps and a checkpoint, in bf16 compute."""
    path = write_config(folder, table, max_steps=2, dtype="bf16")
    train(read_run(str(path), flags).value, world, str(path), Console(quiet=True))


def made(folder: Path, world: World, flags: tuple[str, ...]) -> None:
    """A tiny video of Open-Sora 2.0's preset."""
    folder.mkdir()
    picture = folder / "reference.png"
    write_image(picture, np.zeros((64, 64, 3), np.uint8))
    own = ("--tiny", "--dtype", "bf16", "--prompt", "a red circle", "--save-dir", str(folder))
    flags = tuple(flag.format(picture=picture) for flag in flags)
    generate_from(resolve_source(str(PRESET), [*own, *flags]), world, lambda line: None)


def mixed(make: Callable[[], Any]) -> str:
    """The error of what CUDA would refuse."""
    try:
        make()
    except (RuntimeError, TypeError) as error:
        return str(error)
    return "nothing was raised"


def mistakes() -> dict[str, str]:
    """What the pretended GPU says of what a real one refuses."""
    x = torch.ones(2, 3, device=GPU)
    return {
        "two devices": mixed(lambda: x + torch.arange(3)),
        "a layer left behind": mixed(lambda: F.linear(x, torch.ones(4, 3))),
        "numpy": mixed(x.numpy),
        "pinned": mixed(x.pin_memory),
        "in place": mixed(lambda: torch.zeros(3).add_(x[0])),
    }


def waiting() -> int:
    """How often the host waits here: four times."""
    before, x = len(waits), torch.ones(2, 3, device=GPU)
    x.sum().item()
    x.cpu()
    if (x > 0).any():
        pass
    x += torch.ones(2, 3).to(GPU)
    x += torch.ones(2, 3).to(GPU, non_blocking=True) + torch.tensor(1.0)
    return len(waits) - before


def found_out(play: Callable[[], None]) -> dict[str, Any]:
    """The last lines of the error of a play, and where the loop of training waited for the device, `ONCE` aside."""
    waits.clear()
    try:
        play()
    except Exception:
        return {"error": traceback.format_exc(limit=-8)}
    steps = [stack for stack in waits if "train/loop.py" in stack and not any(word in stack for word in ONCE)]
    return {"error": None, "waits": [stack[-1500:] for stack in steps]}


def main(folder: Path) -> None:
    sharded.kernel = lambda update, device: update  # there is nothing to compile for
    torch.set_num_threads(1)
    clips = make_shapes(folder / "clips", num_clips=12, num_stills=4)
    table = folder / "clips.parquet"
    probe_table(clips, table)
    with start_world("cpu") as alone, pretended_gpu():
        world = dataclasses.replace(alone, device=GPU)
        found = {"mistakes": mistakes(), "waiting": waiting()}
        for name, flags in TRAINED.items():
            found[name] = found_out(lambda name=name, flags=flags: trained(folder / name, world, table, flags))
        for name, flags in MADE.items():
            found[name] = found_out(lambda name=name, flags=flags: made(folder / name, world, flags))
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[2]))
