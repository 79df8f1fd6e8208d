"""Makes videos from storyboards with TTT-Video, in its own words: a TOML file, and flags `--section.key value`.

torchrun --nproc_per_node 8 sample.py --job.config_file configs/eval/ttt-mlp/9s.toml \
    --eval.input_file inputs/example-9s.json --checkpoint.init_state_dir WEIGHTS

The same as `longtake generate`; what stands in the place of old words is printed. docs/migrating.md lists them.
"""

from __future__ import annotations

import sys

from longtake.cli import main
from longtake.dialects.ttt_video import TTTVideoDialect

if __name__ == "__main__":
    main(["generate", *sys.argv[1:]], TTTVideoDialect())
