"""Sizes, lengths and what is shown of clips."""

from __future__ import annotations

from longtake.config.tree import plain
from longtake.dialects.translation import Translation

_LATER = "is not here yet"
_WHOLE_CLIPS = (
    "leave it out: clips then train at the sizes of video_sample_size, in the longest of its lengths that they fill"
)
MODES = (
    *("random_ratio_crop", "random_frame_crop", "random_hw_adapt", "training_with_video_token_length"),
    *("auto_tile_batch_size", "keep_all_node_same_token_length"),
)


def translate_data(work: Translation, visual: str | None, tiny: bool) -> None:
    """Flags of clips -> `bucket_config`, `dataset`, `condition_config`."""
    for name in MODES:
        if (node := work.take(name)) is not None:
            work.refuse(name, node, _LATER, _WHOLE_CLIPS)
    _conditions(work, visual)
    _buckets(work, tiny)


def _conditions(work: Translation, visual: str | None) -> None:
    """`train_mode` -> `condition_config`."""
    mode = work.take("train_mode")
    if mode is None:
        return
    known = {"normal": "t2v", "inpaint": "inpaint", "i2v": "inpaint"}
    if (word := plain(mode)) not in known:
        work.refuse(
            "train_mode", mode, "is no mode", 'write "normal" (text alone), "inpaint" or "i2v", which is inpaint'
        )
    elif known[word] == "inpaint":
        if visual == "image":
            work.refuse("train_mode", mode, "wants a model that sees a mask, and this one sees images", "write normal")
            return
        if visual is None:
            work.note("train_mode", mode, 'model.visual = "inpaint": the input channels of it start at zero')
            work.put("model", {"visual": "inpaint", "positions": "fun"}, mode)
        work.put("condition_config", {"inpaint": 1.0}, mode)
    elif visual in ("inpaint", "image"):
        work.put("condition_config", {"t2v": 1.0}, mode)


def _buckets(work: Translation, tiny: bool) -> None:
    names = ("video_sample_size", "image_sample_size", "video_sample_n_frames", "train_batch_size")
    video, image, frames, batch = (int(work.number(name, 1)) for name in names)
    like = next((node for name in names if work.is_flag(name) and (node := work.get(name))), work.tree)
    for name in (*names, "token_sample_size", "video_sample_stride", "video_repeat", "enable_bucket"):
        work.take(name)
    if tiny and work.get("bucket_config") is not None:
        return
    lengths = range(5, frames + 1, 4)
    table = {f"{video}px": dict.fromkeys(lengths, (1.0, batch))}
    table.setdefault(f"{image}px", {})[1] = (1.0, batch)
    for resolution, entries in table.items():
        for length, entry in entries.items():
            work.put(f"bucket_config.{resolution}.{length}", entry, work.tree if tiny else like)
