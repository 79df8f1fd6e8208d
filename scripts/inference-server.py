"""Makes videos of the checkpoints of runs as they come, in the words of Lambda's tutorial for Open-Sora 1.2.

python scripts/inference-server.py --expnums 656 657 --preset low4s

The same as `longtake watch` with the prompts of samples/prompts.txt; docs/watch.md tells what it does.
"""

from __future__ import annotations

import sys

from longtake.cli import main
from longtake.cli.console import EXIT_MISTAKE, complain
from longtake.contracts import UserError
from longtake.dialects.opensora_v1_2.server import watch_words

if __name__ == "__main__":
    try:
        words = watch_words(sys.argv[1:])
    except UserError as error:
        complain(str(error))
        sys.exit(EXIT_MISTAKE)
    main(words)
