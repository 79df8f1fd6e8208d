"""Trains the weights of the model, in CogVideoX-Fun's words: the flags of its own train.py, behind its own launchers.

accelerate launch --mixed_precision="bf16" scripts/cogvideox_fun/train.py \
    --pretrained_model_name_or_path MODEL --train_data_meta clips.json --trainable_modules "."

The same as `longtake train`; what stands in the place of old words is printed. docs/migrating.md lists them.
"""

from __future__ import annotations

import sys

from longtake.cli import main
from longtake.dialects.cogvideox_fun import CogVideoXFun

if __name__ == "__main__":
    main(["train", *sys.argv[1:]], CogVideoXFun("train"))
