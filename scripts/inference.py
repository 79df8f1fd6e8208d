"""Makes videos with Open-Sora 1.2, in its own words: its paths of run files, its flags, its run files.

python scripts/inference.py configs/opensora-v1-2/inference/sample.py --num-frames 4s --resolution 720p \
    --aspect-ratio 9:16 --prompt "a beautiful waterfall"

The same as `longtake generate`; what stands in the place of old words is printed. docs/migrating.md lists them.
"""

from __future__ import annotations

import sys

from longtake.cli import main
from longtake.dialects.opensora_v1_2 import OpenSoraV12

if __name__ == "__main__":
    main(["generate", *sys.argv[1:]], OpenSoraV12())
