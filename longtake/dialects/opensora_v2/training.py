"""Conversions of Open-Sora 2.0's training files and flags."""

from __future__ import annotations

from longtake.config.tree import Leaf, plain
from longtake.dialects.opensora_v2.keys import TRAINING
from longtake.dialects.opensora_v2.shared import translate_lora, translate_model, translate_plugin
from longtake.dialects.table import apply_rows
from longtake.dialects.translation import Translation, recompute_fully, recompute_nothing

ALL_BLOCKS = (100, 100)
ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
_DEFAULT = "is not in the file, and Open-Sora's default"


def translate_training(work: Translation) -> None:
    translate_model(work)
    translate_plugin(work)
    translate_lora(work)
    apply_rows(work, TRAINING)
    recomputation_is_given = work.value("grad_checkpoint") is not None
    _recomputation(work)
    _rates(work)
    if work.in_file:
        _old_defaults(work, recomputation_is_given)


def _recomputation(work: Translation) -> None:
    if (node := work.take("grad_ckpt_buffer_size")) is not None:
        size = plain(node)
        if isinstance(size, int) and not isinstance(size, bool) and size > 0:
            dtype = str(work.value("dtype") or "bf16")
            size *= ELEMENT_BYTES.get(dtype, 2)
            text = (
                f"elements of {dtype} there, so model.grad_ckpt_buffer_size = {size:,} bytes: {size / 1e9:.1f} GB "
                "of host memory per process, where Open-Sora's page counts the number as bytes"
            )
            work.note("grad_ckpt_buffer_size", node, text)
        work.put("model.grad_ckpt_buffer_size", size, node, "grad_ckpt_buffer_size")
    if (node := work.take("grad_checkpoint")) is None or (wanted := plain(node)) is None:
        return
    if wanted is False:
        work.note("grad_checkpoint", node, "model.grad_ckpt_settings = None")
        recompute_nothing(work, node)
        work.put("model.grad_ckpt_buffer_size", 0, node, "")
    elif wanted is not True:
        work.refuse("grad_checkpoint", node, "must be True or False")
    elif work.value("model.grad_ckpt_settings") is None:
        work.note("grad_checkpoint", node, f"model.grad_ckpt_settings = {ALL_BLOCKS}: all blocks")
        work.put("model.grad_ckpt_settings", ALL_BLOCKS, node, "")


def _rates(work: Translation) -> None:
    """`--lr` and `--eps` change what the optimizer has, also where a file writes `optim.lr` as a number of its own."""
    for name in ("lr", "eps"):
        given, own = work.get(name), work.get(f"optim.{name}")
        if not isinstance(given, Leaf) or not isinstance(own, Leaf) or given.value == own.value or own.value is None:
            continue
        if work.heights(given.origin) > work.heights(own.origin):
            work.note(name, given, f"counts in place of optim.{name} = {own.value} ({own.origin})")
            work.put(f"optim.{name}", given.value, given)


def _old_defaults(work: Translation, recomputation_is_given: bool) -> None:
    """Lay the old defaults of a file in the old keys."""
    where = work.tree
    if work.get("grad_clip") is None:
        work.say(f"grad_clip: {_DEFAULT} is 0, no clipping; write grad_clip = 1.0 to clip")
        work.put("grad_clip", 0.0, where)
    if work.get("eps") is None and work.get("optim.eps") is None:
        work.say(f"optim.eps: {_DEFAULT} is 1e-8")
        work.put("optim.eps", 1e-8, where)
    if work.get("model.grad_ckpt_settings") is None and not recomputation_is_given:
        work.say(f"grad_checkpoint: {_DEFAULT} is True: model.grad_ckpt_settings = {ALL_BLOCKS}, all blocks")
        work.put("model.grad_ckpt_settings", ALL_BLOCKS, where)
    recompute_fully(work, where)
