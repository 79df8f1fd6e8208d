"""The kinds of given frames of Open-Sora 1.2, by name and as mask strategies."""

from __future__ import annotations

from types import MappingProxyType

from longtake.families.opensora_v1_2_strategy import PATTERN, carried

NOTHING = "identity"
EXTEND = "extend"
# Kinds that stand for a strategy in generation; the masks beside them take a video of the clip's length.
STRATEGIES = {
    "image_head": "0",
    "image_tail": "0,0,0,-1,1",
    "image_head_tail": "0;0,1,0,-1,1",
    EXTEND: carried(5),
}
KINDS = MappingProxyType(
    {
        NOTHING: "nothing is known",
        "image_head": "the first latent frame",
        "image_tail": "the last latent frame",
        "image_head_tail": "the first and the last latent frame",
        "image_random": "one latent frame, anywhere",
        "quarter_head": "up to a quarter of the latent frames, at the beginning",
        "quarter_tail": "up to a quarter of them, at the end",
        "quarter_head_tail": "up to a quarter of them at either end",
        "quarter_random": "up to a quarter of them in a row, anywhere",
        "interpolate": "every other latent frame",
        "random": "a tenth to nine tenths of the latent frames, by chance",
    }
)
# In generation any strategy is a kind, and one by name: the last 5 latent frames, 17 frames, of a video or of the clip
# before, go on.
KIND_PATTERN = f"{EXTEND}|{PATTERN}"
