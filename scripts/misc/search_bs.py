"""Finds the batch size of each bucket for a step time, in Open-Sora 1.2's words.

torchrun --standalone --nproc_per_node 1 scripts/misc/search_bs.py configs/opensora-v1-2/misc/bs.py \
    --data-path clips.csv --resolution 240p

The same as `longtake plan RUN --target-step-seconds 12 --probe`, which prints the bucket_config that it finds.
"""

from __future__ import annotations

import sys

from longtake.cli import main
from longtake.dialects.opensora_v1_2 import OpenSoraV12

if __name__ == "__main__":
    main(["plan", *sys.argv[1:]], OpenSoraV12())
