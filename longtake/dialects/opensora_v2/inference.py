"""Conversions of Open-Sora 2.0's inference files and flags."""

from __future__ import annotations

from longtake.dialects.opensora_v2.keys import INFERENCE
from longtake.dialects.opensora_v2.shared import translate_lora, translate_model, translate_plugin
from longtake.dialects.table import apply_rows, refuse_rest
from longtake.dialects.translation import Translation
from longtake.system.tiny import world_size


def translate_inference(work: Translation) -> None:
    translate_model(work)
    translate_plugin(work, world_size=world_size())
    translate_lora(work)
    apply_rows(work, INFERENCE)
    refuse_rest(work, "dataset", INFERENCE)
