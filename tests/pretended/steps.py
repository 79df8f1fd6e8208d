"""Training steps of every family, mode and learned encoder on the fake CUDA device: `steps.py LIBRARY FOLDER TREE
[MODE...]` runs the package of a checkout and writes what the host did in each step into FOLDER/steps.json."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

if __name__ == "__main__":
    ctypes.CDLL(sys.argv[1])  # before PyTorch
    sys.path[:1] = [sys.argv[3]]
    import longtake

    assert Path(longtake.__file__).is_relative_to(sys.argv[3])
    sys.path[:1] = [str(Path(__file__).parents[2])]  # of this checkout are the fake device and the runs

import dataclasses
import json
import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from rich.console import Console

from longtake.data.clips.video import write_video
from longtake.data.probing.probe import probe_table
from longtake.encode.run import EncodeOptions, encode
from longtake.parallel.world import World, start_world
from longtake.presets import find_preset
from longtake.train.loop import Trainer
from longtake.train.optimizer import sharded
from longtake.train.optimizer.update import WeightUpdate
from longtake.train.run import train
from longtake.train.run_file import read_run
from tests.data.made_clips import noise_frames
from tests.pretended.gpu import GPU, pretended_gpu, queue, waits

FRAMES, SIDE = 20, 64  # of a clip
STEPS = 3
SHORT = ("--bucket_config", "{'_delete_': True, '64px': {9: (1.0, 2)}}")
FUN_SHORT = ("--sizes", "None", "--bucket_config", "{'_delete_': True, '64px': {9: (1.0, 2)}}")
CLIPS = ("--bucket_config", "{'_delete_': True, '64x64': {9: (1.0, 2)}}")
PLAIN = ("--dtype", "fp32")  # in which no Triton kernel is chosen, which nothing here could compile
FULL = ("--ema_decay", "0.9", "--grad_clip", "1.0")
I2V = ("--model.visual", "image", "--condition_config", "{'_delete_': True, 't2v': 1, 'i2v_head': 3}")
LEARNED = (
    "--model.positions",
    "fun",
    "--model.use_rotary_positional_embeddings",
    "True",
    "--model.use_learned_positional_embeddings",
    "True",
)
STORED = "stored"
OFFLOADED = "opensora_v2 masters in host memory"
# wide enough for blocks of 64
WIDER = ("--model.hidden_size", "64", "--model.num_heads", "2", "--model.axes_dim", "(8, 12, 12)")
IN_FSDP = "FSDP2 foreach_reduce"
MODES: dict[str, tuple[str, tuple[str, ...]]] = {
    "opensora_v2 t2v": ("opensora_v2/stage1", (*SHORT, *FULL)),
    "opensora_v2 i2v": ("opensora_v2/stage1_i2v", SHORT),
    "opensora_v2 lora": ("opensora_v2/lora", SHORT),
    "opensora_v2 lora on nf4": ("opensora_v2/lora", (*SHORT, *WIDER, "--lora.base", "nf4")),
    OFFLOADED: ("opensora_v2/stage1", (*SHORT, *FULL, "--parallel.cpu_offload", "True")),
    f"opensora_v2 i2v {STORED}": ("opensora_v2/stage1_i2v", SHORT),
    "opensora_v1_2 t2v": ("opensora_v1_2/stage1", (*CLIPS, *FULL, *PLAIN, "--condition_config", "None")),
    "opensora_v1_2 masks": ("opensora_v1_2/stage1", (*CLIPS, *PLAIN)),
    f"opensora_v1_2 masks {STORED}": ("opensora_v1_2/stage1", (*CLIPS, *PLAIN)),
    "cogvideox t2v": ("cogvideox_fun/full_2b", (*FUN_SHORT, *FULL)),
    "cogvideox i2v": ("cogvideox_fun/full_5b", (*FUN_SHORT, *I2V)),
    "cogvideox inpaint": ("cogvideox_fun/lora_5b_inp", FUN_SHORT),
    f"cogvideox inpaint {STORED}": ("cogvideox_fun/lora_2b_inp", FUN_SHORT),
    "cogvideox learned positions": ("cogvideox_fun/full_2b", (*FUN_SHORT, *LEARNED)),
    "cogvideox control": ("cogvideox_fun/control", FUN_SHORT),
    "cogvideox lora": ("cogvideox_fun/lora_2b", FUN_SHORT),
    "ttt_video segments": (
        "ttt_video/ttt_mlp/9s",
        (*PLAIN, "--bucket_config", "{'_delete_': True, '64px': {17: (1.0, 2)}}"),
    ),
    "wan t2v": ("wan/full_1_3b", (*SHORT, *FULL)),
    "wan ti2v": ("wan/lora_5b", SHORT),
    f"wan ti2v {STORED}": ("wan/lora_5b", SHORT),
    "wan i2v": ("wan/lora_i2v_a14b_high", SHORT),
    f"wan i2v {STORED}": ("wan/lora_i2v_a14b_high", SHORT),
    "wan both experts": ("wan/lora_a14b", SHORT),
    "wan lora with block inputs in host memory": ("wan/lora_1_3b", SHORT),
}
BF16 = ("--ae.dtype", "bf16", "--t5.dtype", "bf16")  # as the presets have them
CAUSAL_TILES = ("--ae.use_tiling", "True", "--ae.tile_height", "32", "--ae.tile_width", "32")
CAUSAL_TILES += ("--ae.tile_overlap_height", "0.25", "--ae.tile_overlap_width", "0.25")
OFFLOADED_ENCODERS = ("--t5.placement", "offloaded", "--ae.placement", "offloaded")
# With the learned autoencoder and text encoders of a tiny release: its name in RELEASES and flags.
RELEASED: dict[str, tuple[str, tuple[str, ...]]] = {
    "opensora_v2 hunyuan_vae": ("opensora_v2", (*SHORT, *BF16, "--condition_config", "{'t2v': 1, 'i2v_head': 3}")),
    "opensora_v2 hunyuan_vae in tiles": ("opensora_v2", (*SHORT, "--ae.sample_size", "32")),
    "opensora_v2 autoencoder_2d": ("opensora_v2", (*SHORT, *BF16)),
    "opensora_v1_2 opensora_vae": ("opensora_v1_2", (*CLIPS, *BF16, *PLAIN)),
    "cogvideox cogvideox_vae": ("cogvideox", (*SHORT, *BF16)),
    "cogvideox cogvideox_vae in tiles": ("cogvideox", (*SHORT, *CAUSAL_TILES)),
    "ttt_video cogvideox_vae": ("ttt_video", (*SHORT, *BF16, *PLAIN)),
    "wan vae and umt5": ("wan", (*SHORT, *BF16)),
    "wan vae and umt5 in host memory": ("wan", (*SHORT, *BF16, *OFFLOADED_ENCODERS)),
    "wan vae in tiles": ("wan", (*SHORT, *CAUSAL_TILES)),
    "wan ti2v vae and umt5": ("wan_ti2v", (*SHORT, *BF16)),
}
COMMON = ("--dtype", "bf16", "--max_steps", str(STEPS), "--slots_per_step", "2", "--ckpt_every", "0")
COMMON += ("--tensorboard", "False", "--seed", "3", "--parallel.replicate", "1")


def main(folder: Path, names: Sequence[str]) -> None:
    sharded.kernel = lambda update, device: update  # there is nothing to compile for
    torch.set_num_threads(1)
    table = write_table(folder)
    names = names or (*MODES, *RELEASED)
    runs = {name: run_of(name, folder / name.replace(" ", "_")) for name in names}  # imports libraries: on the CPU
    found = {}
    with start_world("cpu") as alone, pretended_gpu():
        world = dataclasses.replace(alone, device=GPU)
        for name, (path, flags) in runs.items():
            found[name] = observe(name, path, flags, folder / name.replace(" ", "_"), world, table)
            (folder / "steps.json").write_text(json.dumps(found))


def write_table(folder: Path) -> Path:
    """Clips, each its own control video, with a caption; in `segments.parquet` with one for each of two segments."""
    paths = [str(folder / f"{number}.mp4") for number in range(12)]
    for number, path in enumerate(paths):
        write_video(path, noise_frames(FRAMES, SIDE, SIDE, seed=number), 16)
    pq.write_table(pa.table({"path": paths, "text": [f"scene {path}" for path in paths]}), folder / "list.parquet")
    probe_table(folder / "list.parquet", folder / "clips.parquet")
    table = pq.read_table(folder / "clips.parquet").append_column("control", [paths])
    texts = [json.dumps([text, f"then {text}"]) for text in table["text"].to_pylist()]
    pq.write_table(table, folder / "clips.parquet")
    pq.write_table(table.set_column(table.column_names.index("text"), "text", [texts]), folder / "segments.parquet")
    return folder / "clips.parquet"


def run_of(name: str, folder: Path) -> tuple[str, tuple[str, ...]]:
    """The run file and flags of a mode. A release is written into `folder`."""
    if name in MODES:
        preset, flags = MODES[name]
        return str(find_preset(preset)), ("--tiny", *flags)
    from tests.encoders.tiny_weights import FLUX, tiny_flux  # of families that an earlier checkout may not have
    from tests.verification.releases import RELEASES, write_run

    release, flags = RELEASED[name]
    sections = RELEASES[release](folder)
    if "autoencoder_2d" in name:
        tiny_flux(folder / "flux.safetensors")
        sections["ae"] = {"type": "autoencoder_2d", "from_pretrained": str(folder / "flux.safetensors"), **FLUX}
    return str(write_run(folder, sections)), flags


def observe(name: str, path: str, flags: tuple[str, ...], folder: Path, world: World, table: Path) -> dict[str, Any]:
    """A run of one mode: its error, and of each step what `watched` notes."""
    if "segments" in name:
        table = table.with_name("segments.parquet")
    words = (*COMMON, *flags, "--dataset.data-path", str(table), "--outputs", str(folder))
    steps: list[dict[str, Any]] = []
    try:
        if name.endswith(STORED):
            words = (*words, "--dataset.views", "2")
            run = read_run(path, words).value
            options = EncodeOptions(folder / "store", num_workers=0)
            encode(run, run.dataset, run.bucket_rule, run.stage_number, options, world, kinds=run.condition_config)
            words = (*words, "--dataset.latents", str(folder / "store"))
        with watched(steps):
            train(read_run(path, words).value, world, path, Console(quiet=True))
    except Exception:
        return {"error": traceback.format_exc(limit=-8), "steps": steps}
    return {"error": None, "steps": steps}


@contextmanager
def watched(steps: list[dict[str, Any]]) -> Iterator[None]:
    """Inside, each step of a run is noted: where the host waited and copied from pageable memory, how many operations
    it launched, at which launch each phase began, and which events it waited for."""
    micro_batch, update, save = Trainer.micro_batch, WeightUpdate.__call__, Trainer.save
    forward_backward = Trainer.forward_backward
    begun = [0, 0, 0, 0, 0]

    def marks() -> list[int]:
        lists = waits, queue.pageable, queue.not_deterministic, queue.reads
        return [*map(len, lists), queue.launches]

    def close() -> None:
        if not steps or "launches" in steps[-1]:
            return
        steps[-1] |= {
            "waits": list(map(called_from, waits[begun[0] :])),
            "pageable": list(map(called_from, queue.pageable[begun[1] :])),
            "not_deterministic": queue.not_deterministic[begun[2] :],
            "reads": queue.reads[begun[3] :],
            "launches": queue.launches - begun[4],
        }

    def begins(trainer: Trainer, *arguments: Any) -> torch.Tensor:
        close()
        begun[:] = marks()
        steps.append({"begins": queue.launches, "prepares": [], "forwards": []})
        return forward_backward(trainer, *arguments)

    def prepares(trainer: Trainer, *arguments: Any) -> torch.Tensor:
        steps[-1]["prepares"].append(queue.launches)
        if not hasattr(trainer, "_hooked"):
            trainer._hooked = [
                system.denoiser.register_forward_pre_hook(
                    lambda *_: steps[-1]["forwards"].append(queue.launches), prepend=True
                )
                for system in getattr(trainer.system, "experts", [trainer.system])  # an earlier checkout has one
            ]
        return micro_batch(trainer, *arguments)

    def updates(*arguments: Any) -> Any:
        steps[-1] |= {"updates": queue.launches, "trained": len(arguments[0].optimizer.parameters)}
        return update(*arguments)

    def saves(*arguments: Any, **options: Any) -> bool:
        close()
        return save(*arguments, **options)

    with ExitStack() as stack:
        for owner, name, call in (
            (Trainer, "forward_backward", begins),
            (Trainer, "micro_batch", prepares),
            (Trainer, "save", saves),
            (WeightUpdate, "__call__", updates),
        ):
            stack.enter_context(patch.object(owner, name, call))
        yield


def called_from(stack: str) -> str:
    """The innermost calls of a stack that are the package's, as `file function < file function`; or that it is FSDP2
    which copies a gradient to the host."""
    if "in foreach_reduce" in stack:
        return IN_FSDP
    calls = re.findall(r'/longtake/([\w/]+\.py)", line \d+, in (\w+)', stack)
    return " < ".join(f"{file} {function}" for file, function in calls[:-4:-1])


if __name__ == "__main__":
    main(Path(sys.argv[2]), sys.argv[4:])
