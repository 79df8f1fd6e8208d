"""Makes a table of clips into memory-mapped shards, in Open-Sora 2.0's words.

python scripts/cnv/shard.py videos.parquet          writes videos.shards/ beside it
python scripts/cnv/shard.py videos.parquet 10000    the old second argument, a number of shards, is not needed
"""

from __future__ import annotations

import argparse
import sys

from longtake.cli import main


def convert() -> None:
    """Translates the old words into those of `longtake data shard`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input_path", help="the table: .parquet, .csv, .arrow, .json, .jsonl")
    parser.add_argument("k", nargs="?", type=int, help="number of shards; not used, their size is fixed")
    parser.add_argument("--k", dest="named_k", type=int, help=argparse.SUPPRESS)
    known, others = parser.parse_known_args()
    if known.k is not None or known.named_k is not None:
        print("shard.py: k is not needed, shards have a fixed number of rows", file=sys.stderr)
    main(["data", "shard", known.input_path, *others])


if __name__ == "__main__":
    convert()
