"""Writes into longtake/encoders/published.json what a trace sees of the encoders that the presets name.

python tools/encoder_costs.py            write it
python tools/encoder_costs.py --check    exit 1 if a trace says anything else
"""

from __future__ import annotations

import argparse
import json
import sys
from math import prod
from typing import Any

from longtake import presets
from longtake.encoders import (
    Autoencoder2DConfig,
    ClipEncoderConfig,
    CogVideoXVAEConfig,
    HunyuanVAEConfig,
    T5EncoderConfig,
)
from longtake.encoders.cost import PUBLISHED, facts_of, largest_piece, look, peak_of_piece, seen
from longtake.train import RunWithoutTable, read_run


def large_pieces(section: HunyuanVAEConfig) -> dict[str, int]:
    """Bytes at the worst moment of pieces that follow no law, by sizes: of all buckets of the presets."""
    found: dict[str, int] = {}
    for preset in presets.presets():
        layers = RunWithoutTable if "stages" not in preset.path.read_text(encoding="utf-8") else None
        if preset.kind == "train" and layers is not None:
            config = read_run(str(preset.path), [], layers).value
            for bucket in config.bucket_rule.buckets if config.ae.type == section.type else ():
                sizes = largest_piece(section, bucket.shape)
                if prod(sizes) > seen(section)["most"]:
                    found["x".join(map(str, sizes))] = peak_of_piece(section, bucket.shape)
    return dict(sorted(found.items()))


def seen_now() -> list[dict[str, Any]]:
    """The contents of the file, as a trace says now."""
    sections = (HunyuanVAEConfig(), Autoencoder2DConfig(), CogVideoXVAEConfig(), T5EncoderConfig(), ClipEncoderConfig())
    listed = [{"facts": facts_of(section), "seen": look(section)} for section in sections]
    listed[0]["seen"]["pieces"] = large_pieces(sections[0])
    return listed


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
