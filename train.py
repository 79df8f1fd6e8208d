"""Trains TTT-Video, in its own words: a TOML file, and flags `--section.key value`.

torchrun --nproc_per_node 8 train.py --job.config_file configs/train/ttt-mlp/3s.toml \
    --training.jsonl_paths clips.jsonl --checkpoint.init_state_dir WEIGHTS

The same as `longtake train`; what stands in the place of old words is printed. docs/migrating.md lists them.
"""

from __future__ import annotations

import sys

from longtake.cli import main
from longtake.dialects.ttt_video import TTTVideoDialect

if __name__ == "__main__":
    main(["train", *sys.argv[1:]], TTTVideoDialect())
