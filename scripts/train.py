"""Trains Open-Sora 1.2, in its own words: its paths of run files, its flags, its run files.

torchrun --nproc_per_node 8 scripts/train.py configs/opensora-v1-2/lambda/stage1.py \
    --data-path OpenVid-1M.csv --ckpt-path ckpts/PixArt-Sigma-XL-2-2K-MS.pth

The same as `longtake train`; what stands in the place of old words is printed. docs/migrating.md lists them.
"""

from __future__ import annotations

import sys

from longtake.cli import main
from longtake.dialects.opensora_v1_2 import OpenSoraV12

if __name__ == "__main__":
    main(["train", *sys.argv[1:]], OpenSoraV12())
