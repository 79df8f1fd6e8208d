"""Conversions that Open-Sora 2.0's training and inference share: parts of the model, plugins, adapters."""

from __future__ import annotations

import math

from longtake.config.tree import Branch, Leaf, plain
from longtake.dialects.opensora_v2.keys import ADAPTERS, MODEL, PLUGIN, causal_row
from longtake.dialects.table import apply_rows, refuse_rest
from longtake.dialects.translation import Translation, value_of


def translate_model(work: Translation) -> None:
    apply_rows(work, MODEL)
    for section in ("ae", "img_flux_ae"):
        if (kind := work.get(f"{section}.type")) is not None and plain(kind) == "dc_ae":
            fix = 'Longtake has no high-compression autoencoder; choose "hunyuan_vae"'
            work.refuse(f"{section}.type", kind, "is not available", fix)
            work.take(section)
    kind_of_ae = work.value("ae.type")
    apply_rows(work, [causal_row(row.key, kind_of_ae) for row in MODEL if "is_causal_vae" in row.key])


def translate_plugin(work: Translation, world_size: int | None = None) -> None:
    """`plugin` and `plugin_config` -> `parallel`. `world_size`: degrees are cut to what divides it, as in inference."""
    apply_rows(work, PLUGIN)
    enabled = work.take("plugin_config.enable_sequence_parallelism")
    for old, new in (("tp_size", "tensor"), ("sp_size", "sequence")):
        if (size := work.take(f"plugin_config.{old}")) is None:
            continue
        degree = plain(size)
        if new == "sequence" and enabled is not None and plain(enabled) is False and degree not in (1, None):
            work.note("plugin_config.enable_sequence_parallelism", enabled, "sp_size counts as 1")
            degree = 1
        if world_size is not None and isinstance(degree, int) and degree > 1:
            if (fitting := math.gcd(degree, world_size)) != degree:
                work.note(f"plugin_config.{old}", size, f"cut to {fitting}, for there are {world_size} processes")
            degree = fitting
        work.put(f"parallel.{new}", degree, size, f"plugin_config.{old}")
    _zero(work)
    refuse_rest(work, "plugin_config", PLUGIN)


def _zero(work: Translation) -> None:
    plugin, stage = work.take("plugin"), work.take("plugin_config.zero_stage")
    kind, number = value_of(plugin), value_of(stage)
    if plugin is not None and kind not in ("zero1", "zero2", "hybrid", None):
        work.refuse("plugin", plugin, "must be zero1, zero2 or hybrid", "or leave it out and write parallel.zero")
        return
    if stage is not None and number is not None:
        if number not in (0, 1, 2, 3):
            work.refuse("plugin_config.zero_stage", stage, "must be 0, 1, 2 or 3", "write 2")
            return
        if number < 2:
            text = "parallel.zero = 2: optimizer states and gradients are sharded over the data ranks in any case"
            work.note("plugin_config.zero_stage", stage, text)
        work.put("parallel.zero", max(2, number), stage, "plugin_config.zero_stage")
    elif plugin is not None and kind is not None:
        if kind == "zero1":
            work.note("plugin", plugin, "parallel.zero = 2: gradients are sharded over the data ranks too")
        work.put("parallel.zero", 2, plugin, "plugin")


def translate_lora(work: Translation) -> None:
    """`lora_config`, with PEFT's names and defaults -> `lora`."""
    targets = work.get("lora_config.target_modules")
    if isinstance(targets, Leaf) and isinstance(targets.value, str):
        work.take("lora_config.target_modules")
        if targets.value != "all-linear":
            rule = "is a regular expression, or one name without brackets"
            work.refuse("lora_config.target_modules", targets, rule, f"write [{targets.value!r}]; `*` means anything")
        else:
            work.note("lora_config.target_modules", targets, "lora.targets = None: attention and MLPs of all blocks")
    section = work.get("lora_config")
    if isinstance(section, Branch):
        for name in ("r", "lora_alpha"):
            if work.get(f"lora_config.{name}") is None:
                work.put(f"lora_config.{name}", 8, section)
    apply_rows(work, ADAPTERS)
    refuse_rest(work, "lora_config", ADAPTERS)
