"""Writes into longtake/encoders/published.json what a trace sees of the encoders that the presets name.

python tools/encoder_costs.py            write it
python tools/encoder_costs.py --check    exit 1 if a trace says anything else
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from math import prod
from typing import Any

from longtake import presets
from longtake.encoders.autoencoder_config import (
    Autoencoder2DConfig,
    AutoencoderSection,
    CogVideoXVAEConfig,
    HunyuanVAEConfig,
    PixelConfig,
)
from longtake.encoders.config import ClipEncoderConfig, T5EncoderConfig, UMT5EncoderConfig, WordsConfig
from longtake.encoders.cost import PUBLISHED, facts_of, first_chunks, largest_piece, look, peak_of_piece, seen
from longtake.encoders.wan_config import WanVAEConfig
from longtake.train.config import RunConfig, RunWithoutTable
from longtake.train.run_file import read_run


def runs() -> list[RunConfig]:
    """The presets that train by one bucket table."""
    found = [preset.path for preset in presets.presets() if preset.kind == "train"]
    return [
        read_run(str(path), [], RunWithoutTable).value
        for path in found
        if "stages" not in path.read_text(encoding="utf-8")
    ]


def large_pieces(section: AutoencoderSection, runs: Sequence[RunConfig]) -> dict[str, dict[str, int]]:
    """Bytes at the worst moment of pieces that follow no law, of all buckets of the runs with this encoder: by their
    frames for each cell, where those of as many frames agree on it, else by their sizes."""
    alike = [run for run in runs if facts_of(run.ae) == facts_of(section)]
    by_size = {  # in the tiles of the runs, and in those that the section has by default
        largest_piece(tiled, shape): (tiled, shape)
        for run in alike
        for tiled in (section, run.ae)
        for one in run.bucket_rule.buckets
        for shape in first_chunks(tiled, one.shape)
    }
    most = seen(section)["most"]
    peaks = {sizes: peak_of_piece(*by_size[sizes]) for sizes in sorted(by_size) if prod(sizes) > most}
    per_cell: dict[int, set[float]] = {}
    for (frames, cells), peak in peaks.items():
        per_cell.setdefault(frames, set()).add(peak / cells)
    if any(len(found) > 1 or not min(found).is_integer() for found in per_cell.values()):
        return {"pieces": {"x".join(map(str, sizes)): peak for sizes, peak in peaks.items()}}
    return {"per_cell": {str(frames): int(*found) for frames, found in per_cell.items()}} if per_cell else {}


def seen_now() -> list[dict[str, Any]]:
    """The contents of the file, as a trace says now."""
    every = runs()
    sections = [HunyuanVAEConfig(), Autoencoder2DConfig(), CogVideoXVAEConfig(), T5EncoderConfig(), ClipEncoderConfig()]
    sections += [WanVAEConfig(version="2.1"), WanVAEConfig(version="2.2"), UMT5EncoderConfig()]
    sections += [one for run in every for one in (run.ae, *(getattr(run, text.section) for text in run.family.texts))]
    listed: dict[str, dict[str, Any]] = {}
    for section in sections:
        if isinstance(section, WordsConfig | PixelConfig) or (key := str(facts_of(section))) in listed:
            continue
        listed[key] = {"facts": facts_of(section), "seen": look(section)}
        if isinstance(section, AutoencoderSection):
            listed[key]["seen"] |= large_pieces(section, every)
    return list(listed.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the file is out of date")
    text = json.dumps(seen_now(), indent=1) + "\n"
    if not parser.parse_args().check:
        PUBLISHED.write_text(text, encoding="utf-8")
    elif text != PUBLISHED.read_text(encoding="utf-8"):
        sys.exit(f"{PUBLISHED.name}: not what a trace says; run python tools/encoder_costs.py")


if __name__ == "__main__":
    main()
