"""Trains, in Open-Sora 2.0's words: its paths of run files, its keys, its run files.

torchrun --nproc_per_node 8 scripts/diffusion/train.py configs/diffusion/train/stage1.py --dataset.data-path X

The same as `longtake train`; what stands in the place of old words is printed. docs/migrating.md lists them.
"""

from __future__ import annotations

import sys

from longtake.cli import main
from longtake.dialects.opensora_v2 import OpenSora

if __name__ == "__main__":
    main(["train", *sys.argv[1:]], OpenSora())
