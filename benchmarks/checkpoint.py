"""How long a run stands still for a checkpoint: written in the background, beside written while it waits.

python benchmarks/checkpoint.py                      2.5 GB, 4 saves of each kind
python benchmarks/checkpoint.py --gb 8 --device cuda
python benchmarks/checkpoint.py --tiny               a few megabytes, to see that it runs

Tensors are as a run has them: weights, their average and two moments of AdamW, float32. Both kinds write the same
files with checksums and fsync, in turns. A background save begins when the one before it is complete, as in a run
whose checkpoints are farther apart than a write takes; its first save, which makes the memory and the layout, is
shown beside the others and left out of the ratio. While it is written the program computes nothing.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from machine import print_table, write_json
from torch import Tensor

from longtake.checkpoint.background import BackgroundSaver
from longtake.checkpoint.folder import verify
from longtake.checkpoint.runs import retain
from longtake.checkpoint.save import save_checkpoint

TARGET = 0.10  # of the synchronous write
PARTS = ("model.{}", "ema.{}", "optim.{}.exp_avg", "optim.{}.exp_avg_sq")


def main() -> None:
    """Measures and prints one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=2.5, help="10^9 bytes of a checkpoint")
    parser.add_argument("--saves", type=int, default=4, help="of each kind")
    parser.add_argument("--folder", type=Path, help="where to write; default: the system's temporary folder")
    parser.add_argument("--device", default="cpu", help="where the tensors are")
    parser.add_argument("--tiny", action="store_true", help="4 MB")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    num_bytes = 4_000_000 if arguments.tiny else int(arguments.gb * 1e9)
    tensors = make_tensors(num_bytes, torch.device(arguments.device))
    with tempfile.TemporaryDirectory(dir=arguments.folder) as place:
        figures = measure(Path(place), tensors, arguments.saves)
    print_table(
        ("GB", "saves", "synchronous s", "first stall s", "stall s", "stall / synchronous", "complete after s"),
        [
            (
                f"{figures['num_bytes'] / 1e9:.3g}",
                arguments.saves,
                f"{figures['synchronous_seconds']:.3f}",
                f"{figures['first_stall_seconds']:.3f}",
                f"{figures['stall_seconds']:.3f}",
                f"{figures['ratio']:.1%}",
                f"{figures['complete_seconds']:.3f}",
            )
        ],
    )
    print(f"target: stall <= {TARGET:.0%} of the synchronous write, at >= 2 GB; medians from the second save on")
    if not arguments.tiny and figures["ratio"] > TARGET:
        print(f"missed: {figures['ratio']:.1%}")
    write_json(arguments.json, "checkpoint", {"tiny": arguments.tiny, "device": arguments.device, **figures})


def make_tensors(num_bytes: int, device: torch.device) -> dict[str, Tensor]:
    """Tensors of so many bytes together, in 16 layers."""
    layers = 16
    size = num_bytes // (4 * layers * len(PARTS))
    names = [part.format(f"blocks.{layer}.weight") for layer in range(layers) for part in PARTS]
    return {name: torch.rand(size, device=device) for name in names}


def measure(folder: Path, tensors: dict[str, Tensor], saves: int) -> dict[str, Any]:
    """Seconds of each kind of save."""
    synchronous, stalls, complete = [], [], []
    saver = BackgroundSaver()
    for step in range(1, saves + 1):
        start = time.perf_counter()
        save_checkpoint(folder / "synchronous", 0, step, tensors, {"step": step})
        synchronous.append(time.perf_counter() - start)
        retain(folder / "synchronous", 1)
        start = time.perf_counter()
        path = saver.save(folder / "background", 0, step, tensors, {"step": step})
        stalls.append(time.perf_counter() - start)
        saver.wait()
        complete.append(time.perf_counter() - start)
        retain(folder / "background", 1)
    assert verify(path) == []
    saver.close(0.0)
    later = _median(stalls[1:])
    return {
        "num_bytes": sum(tensor.nbytes for tensor in tensors.values()),
        "synchronous_seconds": _median(synchronous[1:]),
        "first_stall_seconds": stalls[0],
        "stall_seconds": later,
        "ratio": later / _median(synchronous[1:]),
        "complete_seconds": _median(complete[1:]),
        "all": {"synchronous": synchronous, "stalls": stalls, "complete": complete},
    }


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


if __name__ == "__main__":
    main()
