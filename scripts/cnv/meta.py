"""Fills in a table of clips from its files, in Open-Sora 2.0's words.

python scripts/cnv/meta.py --input clips.csv --output clips_meta.csv [--num_workers 8]
"""

from __future__ import annotations

import argparse
import os

from longtake.cli import main


def convert() -> None:
    """Translates the old words into those of `longtake data probe`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--input", required=True, help="table with a column path: .csv, .parquet, .arrow, .json, .jsonl"
    )
    parser.add_argument("--output", required=True, help="the table to write; the suffix chooses the format")
    parser.add_argument("--num_workers", type=int, help="processes; 0 works in this one; default: one a core")
    parser.add_argument("--root", default=".", help="folder that relative paths start from; default: the working one")
    known, others = parser.parse_known_args()
    workers = len(os.sched_getaffinity(0)) if known.num_workers is None else known.num_workers
    words = ["data", "probe", known.input, "-o", known.output, "--workers", str(workers), "--root", known.root]
    main([*words, *others])


if __name__ == "__main__":
    convert()
