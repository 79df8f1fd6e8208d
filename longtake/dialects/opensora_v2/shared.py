"""Words that Open-Sora 2.0's training and inference share: parts of the model, plugins, adapters."""

from __future__ import annotations

import math

from longtake.config.tree import Branch, Leaf, plain
from longtake.dialects.translation import Fixed, Translation

ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
SEQUENCE_MODES = {"ring_attn": "ring", "all_to_all": "ulysses"}
BUFFERS = "gradients are summed block by block, beside the backward pass"
PLUGIN_WORDS = {
    "static_graph": "not needed: nothing is recorded from the first step",
    "reduce_bucket_size_in_m": BUFFERS,
    "overlap_allgather": "weights are gathered ahead; parallel.forward_prefetch says how far",
    "overlap_communication": BUFFERS,
    "initial_scale": "bf16 needs no loss scale",
    "max_norm": "grad_clip says how gradients are clipped",
    "precision": "dtype says it",
    "verbose": "there is nothing to report of it",
}
PLUGIN_KEYS = (
    *("tp_size", "sp_size", "pp_size", "zero_stage", "sequence_parallelism_mode", "enable_sequence_parallelism"),
    *("cpu_offload", *PLUGIN_WORDS),
)


def translate_model(work: Translation) -> None:
    work.move({"patch_size": "model.patch_size"})
    for section in ("ae", "img_flux_ae"):
        if (kind := work.get(f"{section}.type")) is not None and plain(kind) == "dc_ae":
            fix = 'Longtake has no high-compression autoencoder; choose "hunyuan_vae"'
            work.refuse(f"{section}.type", kind, "is not here", fix)
            work.take(section)
    causal = "the autoencoder says by itself whether it is causal"
    if work.value("ae.type") in ("hunyuan_vae", None):
        fixed = Fixed((True, None), causal, "Open-Sora's non-causal autoencoder is the high-compression one, not here")
    else:
        fixed = Fixed((True, False, None), causal)
    work.fix({"is_causal_vae": fixed, "sampling_option.is_causal_vae": fixed})


def translate_plugin(work: Translation, world_size: int | None = None) -> None:
    """`plugin` and `plugin_config` -> `parallel`. `world_size`: degrees are cut to what divides it, as in inference."""
    pipeline = "the blocks are not dealt out as a pipeline; sp_size or zero_stage 3 spread their memory"
    work.fix({"plugin_config.pp_size": Fixed((1, None), "", pipeline)})
    work.leave({f"plugin_config.{word}": text for word, text in PLUGIN_WORDS.items()})
    if (mode := work.take("plugin_config.sequence_parallelism_mode")) is not None and plain(mode) is not None:
        if (kind := SEQUENCE_MODES.get(str(plain(mode)))) is not None:
            work.put("parallel.sequence_attention", kind, mode, "plugin_config.sequence_parallelism_mode")
        else:
            rule, fix = f"must be one of {', '.join(SEQUENCE_MODES)}", "ring_attn passes keys, all_to_all heads"
            work.refuse("plugin_config.sequence_parallelism_mode", mode, rule, fix)
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
    work.move({"plugin_config.cpu_offload": "parallel.cpu_offload"})
    _zero(work)
    work.refuse_rest("plugin_config", PLUGIN_KEYS)


def _zero(work: Translation) -> None:
    plugin, stage = work.take("plugin"), work.take("plugin_config.zero_stage")
    kind, number = (None if node is None else plain(node) for node in (plugin, stage))
    if plugin is not None and kind not in ("zero1", "zero2", "hybrid", None):
        work.refuse("plugin", plugin, "must be zero1, zero2 or hybrid", "or leave it out and write parallel.zero")
        return
    if stage is not None and number is not None:
        if number not in (0, 1, 2, 3):
            work.refuse("plugin_config.zero_stage", stage, "must be 0, 1, 2 or 3", "write 2")
            return
        if number < 2:
            text = "parallel.zero = 2: optimizer states and gradients are spread over the data ranks in any case"
            work.note("plugin_config.zero_stage", stage, text)
        work.put("parallel.zero", max(2, number), stage, "plugin_config.zero_stage")
    elif plugin is not None and kind is not None:
        if kind == "zero1":
            work.note("plugin", plugin, "parallel.zero = 2: gradients are spread over the data ranks too")
        work.put("parallel.zero", 2, plugin, "plugin")


def translate_lora(work: Translation) -> None:
    """`lora_config`, with PEFT's words and defaults -> `lora`."""
    fixed = {
        "bias": Fixed(("none", None), "", "biases do not train beside adapters"),
        "lora_dropout": Fixed((0, 0.0, None), "", "adapters have no dropout of their own; write 0"),
        "init_lora_weights": Fixed((True, None), "", "adapters start at a change of zero"),
    }
    work.fix({f"lora_config.{name}": rule for name, rule in fixed.items()})
    work.leave({"lora_config.task_type": "not needed", "lora_config.peft_type": "not needed"})
    if isinstance(targets := work.get("lora_config.target_modules"), Leaf) and isinstance(targets.value, str):
        work.take("lora_config.target_modules")
        if targets.value != "all-linear":
            rule = "is a regular expression, or one name without brackets"
            work.refuse("lora_config.target_modules", targets, rule, f"write [{targets.value!r}]; `*` means anything")
        else:
            work.note("lora_config.target_modules", targets, "lora.targets = None: attention and MLPs of all blocks")
    given = work.get("lora_config")
    if isinstance(given, Branch):
        for name, default in (("r", 8), ("lora_alpha", 8)):
            if work.get(f"lora_config.{name}") is None:
                work.put(f"lora_config.{name}", default, given)
    names = {"r": "rank", "lora_alpha": "alpha", "target_modules": "targets", "use_dora": "dora"}
    work.move({f"lora_config.{old}": f"lora.{new}" for old, new in names.items()})
    work.refuse_rest("lora_config", (*names, *fixed))
    work.move({"lora_checkpoint": "lora.from_pretrained", "pretrained_lora_path": "lora.from_pretrained"})
