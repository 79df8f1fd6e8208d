"""Sizes, lengths and conditioning frames of clips."""

from __future__ import annotations

from longtake.config.tree import plain
from longtake.dialects.cogvideox_fun.keys import SIZES
from longtake.dialects.translation import Translation

_OF_TOKENS = ("training_with_video_token_length", "keep_all_node_same_token_length")
_MODES = {"normal": "t2v", "inpaint": "inpaint", "i2v": "inpaint"}  # -> kind of `condition_config`


def translate_data(work: Translation, visual: str | None, tiny: bool) -> None:
    """Flags of clips -> `sizes`, `condition_config`."""
    work.put("sizes.enable_bucket", False, work.tree)
    if work.is_flag("token_sample_size") and not any(work.value(mode) for mode in _OF_TOKENS):
        node = work.get("token_sample_size")
        assert node is not None
        work.note("token_sample_size", node, f"is read with {' or '.join(f'--{mode}' for mode in _OF_TOKENS)} only")
    for row in SIZES:
        if (node := work.take(row.key)) is not None:  # `--tiny` has sizes of its own
            work.put(row.ours, plain(node), work.tree if tiny else node)
    if (mode := work.take("train_mode")) is None:
        return
    if (kind := _MODES.get(str(plain(mode)))) is None:
        fix = 'write "normal" (text alone), "inpaint", or "i2v", which means inpaint'
        work.refuse("train_mode", mode, "is not a mode", fix)
    elif kind == "t2v":
        if visual in ("inpaint", "image"):
            work.put("condition_config", {kind: 1.0}, mode)
    elif visual == "image":
        work.refuse("train_mode", mode, "wants a model that sees a mask, and this one sees pictures", "write normal")
    else:
        if visual is None:
            work.note("train_mode", mode, 'model.visual = "inpaint": the input channels of it start at zero')
            work.put("model", {"visual": "inpaint", "positions": "fun"}, mode)
        work.put("condition_config", {kind: 1.0}, mode)
