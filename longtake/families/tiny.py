"""What the families' tiny runs have in common (`--tiny`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

TINY_CELL = 16  # pixels along one side of a token
TINY_WORDS, TINY_LENGTH = 64, 16  # width of a text token, and tokens of a caption


def tiny_sections(
    model: Mapping[str, Any], sizes: Mapping[str, Any], side: int, texts: Collection[str] = ("t5",)
) -> dict[str, Any]:
    """Sections that shrink a run whose section `model` is given: the denoiser has `sizes`, latent frames are frames,
    latents have `side` pixels a side, and each of `texts` reads words."""
    buffer = {"grad_ckpt_buffer_size": 2**20} if model.get("grad_ckpt_buffer_size") else {}
    words = {"type": "words", "dim": TINY_WORDS, "max_length": TINY_LENGTH}
    return {
        "model": {"from_pretrained": None, **sizes, **buffer},
        "ae": {"type": "pixel", "temporal": 1, "spatial": side},
        **dict.fromkeys(texts, words),
    }
