"""The demo, measured: how long each part takes and how often the videos show what their prompts ask for.

python benchmarks/demo.py                      the demo as it is
python benchmarks/demo.py --seed 1 --seed 2    at other seeds of the training run
python benchmarks/demo.py --system cogvideox_fun    that of another system, opensora_v1_2 or ttt_video
python benchmarks/demo.py --tiny               a few steps, to see that it runs
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as the command line does, before PyTorch is loaded

import torch
from machine import print_table, write_json

from longtake.demo.judge import Accuracy
from longtake.demo.start import run_demo
from longtake.track.progress import make_console

SHARES = [name for name in Accuracy.__dataclass_fields__ if name != "count"]
TARGET = 0.95  # colour and direction
TARGET_ROWS = "every row of shapes, in the main bucket of others (0.9 of told stories, and of videos from given frames)"
TARGET_SECONDS = {"shapes": 420.0, "cogvideox_fun": 480.0, "ttt_video": 600.0, "opensora_v1_2": 480.0}


def processor_seconds() -> float:
    """What this process and those it has started and that have ended have computed so far."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def main() -> None:
    """Runs the demo at each seed and prints one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, action="append", help="seed of the training run; default: the demo's own")
    parser.add_argument("--system", default="shapes", help="whose demo, as in `longtake demo --system`")
    parser.add_argument("--tiny", action="store_true", help="60 clips, 3 steps")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    sizes = {"num_clips": 60, "num_stills": 12, "of_adapters": ["--max-steps", "3"]} if arguments.tiny else {}
    figures, rows = [], []
    for seed in arguments.seed or [None]:
        flags = ["--max-steps", "3", "--warmup-steps", "1"] if arguments.tiny else []
        flags += [] if seed is None else ["--seed", str(seed)]
        with tempfile.TemporaryDirectory() as folder:
            start = processor_seconds()
            outcome = run_demo(Path(folder) / "demo", make_console(), flags, system=arguments.system, **sizes)
        if outcome.stopped:
            raise SystemExit("benchmarks/demo.py: interrupted, so nothing was measured and no file is written")
        total, computed = sum(outcome.seconds.values()), processor_seconds() - start
        steps = outcome.run.clock.global_step
        figures.append(
            {
                "seed": seed,
                "steps": steps,
                "seconds": {**outcome.seconds, "total": total, "of the processor": computed},
                "checks": outcome.checks,
                "accuracy": {
                    title: {name: None if share != share else share for name, share in vars(accuracy).items()}
                    for title, accuracy in outcome.accuracy.items()
                },
            }
        )
        name = "own" if seed is None else seed
        for title, a in outcome.accuracy.items():
            shares = (f"{share:.1%}" for share in a.shares.values())
            rows.append((name, title, a.count, *shares, "", ""))
        for what, value in outcome.checks.items():
            print(f"{what}: {value:g}")
        no_shares = [""] * len(SHARES)
        for part, seconds in (*outcome.seconds.items(), ("total", total), ("of the processor", computed)):
            rows.append((name, part, "", *no_shares, f"{seconds:.1f}", steps if part == "train" else ""))
    print_table(("seed", "what", "videos", *SHARES, "seconds", "steps"), rows)
    seconds = TARGET_SECONDS.get(arguments.system, 0.0)
    print(f"target: colour and direction >= {TARGET:.0%} in {TARGET_ROWS}, total <= {seconds:.0f} s on 2 quiet cores")
    capability = torch.backends.cpu.get_cpu_capability()  # ATEN_CPU_CAPABILITY=default, avx2 or avx512 chooses it
    write_json(
        arguments.json,
        "demo",
        {"tiny": arguments.tiny, "system": arguments.system, "cpu_capability": capability, "runs": figures},
    )


if __name__ == "__main__":
    main()
