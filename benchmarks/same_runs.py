"""Do two versions of Longtake compute the same, bit by bit? Six short training runs and one that is resumed.

python benchmarks/same_runs.py --json before.json                              this checkout
python benchmarks/same_runs.py --tree ../other --against before.json           another one, compared with it
python benchmarks/same_runs.py --tree ../old --save-checkpoint kept --json before.json
python benchmarks/same_runs.py --from-checkpoint kept --against before.json    resumes what the old version wrote

Each run makes 20 steps on the CPU with one thread, on clips that this program writes itself: text to video, with known
frames, adapters, from a latent store, two processes, a curriculum. For every step the digest of its sample keys and the
bits of its loss are kept, for the end a hash of every tensor of the last checkpoint (weights, EMA, optimizer). The
seventh run goes on for 10 steps from a checkpoint of step 10, which `--from-checkpoint` takes from another version.

Only the command line and config keys are used, so one program runs old versions and new ones. The bits of a loss belong
to a kind of processor and a version of torch; where these differ from the file's, the digests alone are compared.
`results/same_runs.json` holds what commit 9127a13 gives. Takes about two minutes on two cores.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
from machine import commit_of, machine, print_table, write_json

HERE = Path(__file__).resolve().parents[1]
STEPS, SAVED_STEP = 20, 10
CLIPS, STILLS = 32, 8
KINDS = '"t2v": 1, "i2v_head": 2, "i2v_tail": 1, "i2v_loop": 1'
PATIENCE_SECONDS = 600
SAME_MACHINE = ("processor", "torch")

BASE = """
seed = 7
dtype = "fp32"
device = "cpu"
dataset = dict(data_path="clips/clips.parquet", cache_mb=16)
bucket_config = {"32px": {1: (1.0, 4), 8: (0.9, 3), 16: (1.0, 2)}}
ae = dict(type="pixel", temporal=8, spatial=8)
t5 = dict(type="words", dim=16, max_length=8)
clip = dict(type="words", dim=16, max_length=8)
model = dict(
    type="flux", in_channels=1536, patch_size=1, hidden_size=36, num_heads=2, axes_dim=(6, 6, 6), depth=1,
    depth_single_blocks=2, vec_in_dim=16, context_in_dim=16, fused_qkv=True,
)
objective = dict(predict="clean", shift=None)
dropout_ratio = dict(t5=0.2, clip=0.2)
outputs = "outputs"
lr = 3e-3
eps = 1e-8
warmup_steps = 4
ema_decay = 0.9
slots_per_step = 4
num_workers = 0
tensorboard = False
max_steps = 20
"""

# Run -> what its file says beyond BASE. Between them they use two caption columns, two things to predict,
# recomputation, loader workers, accumulation, weight decay and clipping.
RUNS = {
    "t2v": "",
    "i2v": f"""
condition_config = {{{KINDS}, "v2v_head": 1, "v2v_tail": 1}}
no_i2v_ref_loss = True
ae = dict(temporal=1)
model = dict(in_channels=192, cond_embed=True, grad_ckpt_settings=(1, 1))
objective = dict(predict="velocity", shift="resolution")
""",
    "lora": """
lora = dict(rank=2, alpha=4)
model = dict(fused_qkv=False)
""",
    "stored": f"""
condition_config = {{{KINDS}}}
model = dict(cond_embed=True)
dataset = dict(captions=dict(text=0.5, short=0.5), views=2)
""",
    "two processes": """
optim = dict(weight_decay=0.01, betas=(0.9, 0.98))
grad_clip = 0.5
num_workers = 1
""",
    "curriculum": """
stages = [
    dict(name="stills", bucket_config={"32px": {"_delete_": True, 1: (1.0, 4)}}, max_steps=5),
    dict(name="clips", lr=1e-3, use_cosine_scheduler=True, max_steps=10),
    dict(name="adapters", lora=dict(rank=3, alpha=3), accumulation_steps=2, slots_per_step=None, max_steps=5),
]
""",
}
RESUMED = "resumed"


class Tree:
    """A checkout whose `longtake` command is run, in a folder with the clips."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.source, self.folder = source.resolve(), folder
        where = self._python("-c", "import importlib.util as u; print(u.find_spec('longtake').origin)").strip()
        if not Path(where).resolve().is_relative_to(self.source):
            raise SystemExit(f"--tree {source}: `import longtake` finds {where}; give the root of a checkout")

    def longtake(self, *words: str, processes: int = 1) -> None:
        """One command, from the folder. Exits with its words where it fails."""
        program = ["-m", "longtake", *words]
        if processes > 1:
            launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--master_addr", "127.0.0.1"]
            program = [*launcher, "--master_port", str(_free_port()), *program]
        self._python(*program)

    def _python(self, *words: str) -> str:
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(self.source), "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            [sys.executable, *words],
            cwd=self.folder,
            env=variables,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr[-4000:]}")
        return done.stdout


def main() -> None:
    """Runs, prints a table, compares; exit status 1 where anything differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=HERE, help="root of the checkout to run; default: this one")
    parser.add_argument("--only", help="names of runs, separated by commas; default: all")
    parser.add_argument("--save-checkpoint", type=Path, help="keep the checkpoint of step 10 in this folder")
    parser.add_argument("--from-checkpoint", type=Path, help="resume from what --save-checkpoint kept")
    parser.add_argument("--against", type=Path, help="figures of another version, to compare with")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    names = arguments.only.split(",") if arguments.only else [*RUNS, RESUMED]
    if unknown := set(names) - {*RUNS, RESUMED}:
        parser.error(f"--only {arguments.only}: no run {min(unknown)}; choose from {', '.join([*RUNS, RESUMED])}")
    with tempfile.TemporaryDirectory() as place:
        tree = Tree(arguments.tree, Path(place))
        runs = measure(tree, names, arguments.save_checkpoint, arguments.from_checkpoint)
    rows = [
        (name, len(run["steps"]), run["steps"][-1][2], run["tensors"], run["hash"][:16], f"{run['seconds']:.0f}")
        for name, run in runs.items()
    ]
    print_table(("run", "steps", "last loss", "tensors", "their hash", "seconds"), rows)
    write_json(arguments.json, "same_runs", {"tree": commit_of(tree.source), "runs": runs})
    if arguments.against is not None:
        known = json.loads(arguments.against.read_text(encoding="utf-8"))
        with_bits = all(known["machine"][key] == machine()[key] for key in SAME_MACHINE)
        if not with_bits:
            print(f"{arguments.against} is from another processor or torch: the digests alone are compared")
        found = list(differences(known["figures"]["runs"], runs, with_bits))
        print("\n".join(found) or f"the same as {arguments.against}")
        sys.exit(1 if found else 0)


def measure(tree: Tree, names: Sequence[str], save: Path | None, load: Path | None) -> dict[str, Any]:
    """What each run gave: [step, digest, bits of the loss] for each step, and the hash of its last checkpoint."""
    make_clips(tree.folder / "clips")
    tree.longtake("data", "probe", "clips/clips.csv", "-o", "clips/clips.parquet")
    figures = {}
    for name in names:
        begun = time.perf_counter()
        folder = _resume(tree, save, load) if name == RESUMED else _train(tree, name)
        stages = [folder / stage for stage in ("stills", "clips", "adapters")] if name == "curriculum" else [folder]
        steps = [step for stage in stages for step in _steps(stage)]
        count, digest = _tensors(_checkpoint(stages[-1]))
        seconds = round(time.perf_counter() - begun, 1)
        figures[name] = {"steps": steps, "tensors": count, "hash": digest, "seconds": seconds}
        wanted = STEPS - SAVED_STEP if name == RESUMED else STEPS
        if len(steps) != wanted:
            raise SystemExit(f"{name}: {len(steps)} steps in its metrics, {wanted} are expected")
    return figures


def differences(known: dict[str, Any], found: dict[str, Any], with_bits: bool = True) -> Iterator[str]:
    """A line for everything in `found` that is not as in `known`."""
    for name, run in found.items():
        if name not in known:
            yield f"{name}: is not in the other file"
            continue
        for ours, theirs in zip(run["steps"], known[name]["steps"], strict=True):
            if ours[:2] != theirs[:2]:
                yield f"{name}, step {ours[0]}: other samples, digest {ours[1]} for {theirs[1]}"
            if with_bits and ours[2] != theirs[2]:
                yield f"{name}, step {ours[0]}: loss {ours[2]} for {theirs[2]}"
        if with_bits and run["hash"] != known[name]["hash"]:
            yield f"{name}: other tensors in the last checkpoint ({run['tensors']} for {known[name]['tensors']})"


def make_clips(folder: Path) -> None:
    """Squares that move over a grey ground, as mp4 and png files, and `clips.csv`: the same pixels on every machine."""
    folder.mkdir()
    draws = np.random.default_rng(0)
    rows = []
    for number in range(CLIPS + STILLS):
        height, width = ((32, 32), (24, 40))[int(draws.integers(4) == 0)]
        length = int(draws.integers(18, 21) if draws.integers(3) == 0 else draws.integers(10, 13))
        length = length if number < CLIPS else 1
        colour = draws.integers(0, 255, 3, dtype=np.uint8)
        x, y = int(draws.integers(2, 12)), int(draws.integers(2, 12))
        frames = np.full((length, height, width, 3), draws.integers(40, 190, dtype=np.uint8))
        for index, frame in enumerate(frames):
            frame[y : y + 8, x + index // 2 : x + index // 2 + 8] = colour
        name = f"{number:03d}.{'mp4' if number < CLIPS else 'png'}"
        _write(folder / name, frames)
        words = f"a square of {['red', 'green', 'blue'][int(colour.argmax())]}"
        rows.append((name, f"{words} from {x} {y}", words))
    with (folder / "clips.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("path", "text", "short"), *rows])


def _write(path: Path, frames: np.ndarray) -> None:
    """MPEG-4 or PNG, on one thread."""
    codec, pixels = ("mpeg4", "yuv420p") if path.suffix == ".mp4" else ("png", "rgb24")
    with av.open(str(path), "w", format=None if path.suffix == ".mp4" else "image2", options={}) as file:
        stream = file.add_stream(codec, rate=8)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt, stream.codec_context.thread_count = pixels, 1
        for frame in frames:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        file.mux(stream.encode())


def _train(tree: Tree, name: str) -> Path:
    """The folder of a run of RUNS."""
    config, words = _config(tree, name), []
    if name == "stored":
        tree.longtake("data", "encode", config, "-o", "store", "--shard-mb", "0.1")
        words = ["--dataset.latents", "store"]
    tree.longtake("train", config, *words, processes=2 if name == "two processes" else 1)
    return tree.folder / "outputs" / name


def _resume(tree: Tree, save: Path | None, load: Path | None) -> Path:
    """The folder of the run that goes on from step 10 of `load`, or of a run of the same tree."""
    config = _config(tree, RESUMED)
    if load is None:
        tree.longtake("train", config, "--exp_name", "begun", "--max_steps", str(SAVED_STEP))
        source = _checkpoint(tree.folder / "outputs" / "begun")
    else:
        source = _checkpoint(load)
    if save is not None:
        shutil.copytree(source, save / source.name)
    kept = tree.folder / "outputs" / "kept" / source.name
    shutil.copytree(source, kept)  # what is resumed may be read, and is not ours to change
    tree.longtake("train", config, "--load", str(kept.relative_to(tree.folder)))
    return tree.folder / "outputs" / RESUMED


def _config(tree: Tree, name: str) -> str:
    """Writes the file of a run; dicts of a run's own words are merged into those of BASE."""
    (tree.folder / "base.py").write_text(BASE, encoding="utf-8")
    own = f'_base_ = "base.py"\nexp_name = {name!r}\n{RUNS.get(name, "")}'
    (tree.folder / f"{name}.py").write_text(own, encoding="utf-8")
    return f"{name}.py"


def _steps(run: Path) -> list[list[Any]]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [[line["step"], line["digest"], line["loss_bits"]] for line in map(json.loads, lines)]


def _checkpoint(run: Path) -> Path:
    """The last complete checkpoint in a folder."""
    found = [marker.parent for marker in run.glob("*global_step*/COMPLETE")]
    if not found:
        raise SystemExit(f"{run}: no complete checkpoint in it")
    return max(found, key=lambda path: int(path.name.rpartition("global_step")[2]))


def _tensors(checkpoint: Path) -> tuple[int, str]:
    """How many tensors, or parts of one, a checkpoint holds, and one hash of their names, types, shapes and bytes.

    Frozen weights, which are written once beside all checkpoints, are counted with it.
    """
    parts = []
    for file in (*checkpoint.rglob("*.safetensors"), *checkpoint.parent.glob("frozen/**/*.safetensors")):
        content = file.read_bytes()
        size = int.from_bytes(content[:8], "little")
        head = json.loads(content[8 : 8 + size])
        for name, facts in head.items():
            if name == "__metadata__":
                continue
            start, end = (8 + size + offset for offset in facts["data_offsets"])
            digest = hashlib.sha256(content[start:end]).hexdigest()
            parts.append(f"{name} {facts['dtype']} {facts['shape']} {digest}")
    return len(parts), hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


if __name__ == "__main__":
    main()
