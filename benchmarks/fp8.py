"""The demo's model trained in bf16 and in float8, each at three seeds: where their losses end.

python benchmarks/fp8.py                 600 steps, of the demo's 3,000: warm-up and learning rate are the demo's
python benchmarks/fp8.py --steps 3000    the demo's whole training
python benchmarks/fp8.py --tiny          3 steps, to see that it runs

`end` is the mean loss of the last tenth of the steps. Runs of one seed see the same samples and noise. On a CPU float8
is emulated: operands are rounded as a GPU's are, products are float32's.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from machine import print_table, write_json

from longtake.data.probing.probe import probe_table
from longtake.data.shapes import make_shapes
from longtake.demo.start import NUM_CLIPS, NUM_STILLS
from longtake.demo.systems import looks
from longtake.presets import run_file
from longtake.track.progress import make_console
from longtake.track.trackers import METRICS_FILE, read_lines
from longtake.train.run import train_run
from longtake.train.run_file import read_run

SEEDS = (1024, 1, 2)


def main() -> None:
    """Trains every run and prints one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    steps = 3 if arguments.tiny else arguments.steps
    with tempfile.TemporaryDirectory() as folder:
        sizes = (60, 12) if arguments.tiny else (NUM_CLIPS, NUM_STILLS)
        look = looks(read_run(run_file("demo/shapes", "train")).value)
        made = make_shapes(Path(folder) / "clips", num_clips=sizes[0], num_stills=sizes[1], **look)
        probe_table(made, table := Path(folder) / "clips" / "clips.parquet")
        runs = [one_run(table, Path(folder), seed, fp8, steps) for fp8 in (False, True) for seed in SEEDS]
    write_json(arguments.json, "fp8", compared(runs))


def compared(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Prints one table; returns the figures."""
    bf16, fp8 = ([run["end"] for run in runs if run["precision"] == name] for name in ("bf16", "fp8"))
    print_table(("seed", "precision", "steps", "end"), [list(run.values()) for run in runs])
    more = [ours / theirs - 1 for ours, theirs in zip(fp8, bf16, strict=True)]
    print(f"bf16: {min(bf16):.4f} to {max(bf16):.4f}; float8: {min(fp8):.4f} to {max(fp8):.4f}")
    print(f"float8 over bf16, seed by seed: {', '.join(f'{share:+.1%}' for share in more)}")
    inside = [min(bf16) <= end <= max(bf16) for end in fp8]
    return {"runs": list(runs), "bf16_range": [min(bf16), max(bf16)], "inside": inside, "more": more}


def one_run(table: Path, outputs: Path, seed: int, fp8: bool, steps: int) -> dict[str, Any]:
    """Trains the demo's model once; returns where its loss ends."""
    name = f"{'fp8' if fp8 else 'bf16'}_{seed}"
    words = ["--dataset.data-path", str(table), "--outputs", str(outputs), "--exp-name", name, "--seed", str(seed)]
    words += ["--max-steps", str(steps), "--ckpt-every", "0", "--log-every", "1", "--num-workers", "0"]
    words += ["--precision", "fp8"] if fp8 else []
    train_run(run_file("demo/shapes", "train"), words, console=make_console())
    return end_of(outputs / name, seed, fp8)


def end_of(run: Path, seed: int, fp8: bool) -> dict[str, Any]:
    """The mean loss of the last tenth of a run."""
    losses = [line["loss"] for line in read_lines(run / METRICS_FILE) if "loss" in line]
    last = losses[-max(1, len(losses) // 10) :]
    return {"seed": seed, "precision": "fp8" if fp8 else "bf16", "steps": len(losses), "end": sum(last) / len(last)}


if __name__ == "__main__":
    main()
