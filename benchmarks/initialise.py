"""Time to draw the initial weights of a model: every parameter whole, as each rank of any mesh does.

python benchmarks/initialise.py             CogVideoX-2B on the CPU with 1, 2, 4 ... threads, and on CUDA where it is
python benchmarks/initialise.py --tiny      a few blocks, to see that it runs

Each line draws all parameters once by `initial_values` and drops them. Numbers do not depend on the threads. Processor
seconds do not count other work on the machine.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from machine import print_table, write_json
from torch import nn

from longtake import random
from longtake.models.build import build_denoiser
from longtake.models.cogvideox_config import CogVideoXConfig
from longtake.models.initial import initial_values
from longtake.plan.timing import clock

TWO_B = CogVideoXConfig(num_layers=30, num_attention_heads=30)
TARGET_SECONDS = 20.0


def seconds_of(model: nn.Module, device: torch.device) -> float:
    """Seconds to draw every parameter of a model on a device."""
    start = clock(device)
    with device:
        for name, _ in model.named_parameters():
            initial_values(model, name, seed=0)
    return clock(device) - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a few blocks")
    parser.add_argument("--json", type=Path, help="write the figures there")
    given = parser.parse_args()
    config = TWO_B.model_copy(update={"num_layers": 1, "num_attention_heads": 4}) if given.tiny else TWO_B
    with torch.device("meta"):
        model = build_denoiser(config)
    count = sum(p.numel() for p in model.parameters())
    most = random.num_threads()
    lines: list[dict[str, Any]] = []
    for threads in sorted({*(1 << i for i in range(most.bit_length())), most}):
        with patch.object(random, "num_threads", return_value=threads):
            processor, seconds = time.process_time(), seconds_of(model, torch.device("cpu"))
        lines.append({"device": "cpu", "threads": threads, "seconds": seconds})
        lines[-1]["processor_seconds"] = time.process_time() - processor
    if torch.cuda.is_available():
        lines.append({"device": torch.cuda.get_device_name(), "seconds": seconds_of(model, torch.device("cuda"))})
    rows = [
        (line["device"], line.get("threads", "-"), f"{line['seconds']:.1f}", f"{line.get('processor_seconds', 0):.1f}")
        for line in lines
    ]
    print_table((f"{count / 1e9:.2f} B parameters on", "threads", "seconds", "processor seconds"), rows)
    print(f"target: {TARGET_SECONDS:.0f} s for 2 B parameters")
    write_json(given.json, "initialise", {"tiny": given.tiny, "parameters": count, "lines": lines})


if __name__ == "__main__":
    main()
