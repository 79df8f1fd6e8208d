"""Makes videos, in Open-Sora 2.0's words: its paths of run files, its keys, its run files.

torchrun --nproc_per_node 1 scripts/diffusion/inference.py configs/diffusion/inference/256px.py \
    --save-dir samples --prompt "raining, sea"

The same as `longtake generate`; what stands in the place of old words is printed. docs/migrating.md lists them.
"""

from __future__ import annotations

import sys

from longtake.cli import main
from longtake.dialects.opensora_v2 import OpenSora

if __name__ == "__main__":
    main(["generate", *sys.argv[1:]], OpenSora())
