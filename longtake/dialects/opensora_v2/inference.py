"""The words of Open-Sora 2.0's inference files and flags."""

from __future__ import annotations

from longtake.dialects.opensora_v2.shared import translate_lora, translate_model, translate_plugin
from longtake.dialects.translation import Fixed, Translation
from longtake.system.tiny import world_size

# In files; as flags they are Longtake's own. `guidance` is not among them: in files it is an input of FLUX.
_OPTIONS = ("resolution", "aspect_ratio", "num_frames", "num_steps", "guidance_img")
ALIASES = {**{name: f"sampling_option.{name}" for name in _OPTIONS}, "ckpt_path": "model.from_pretrained"}
MOVED = {"dataset.data_path": "prompts", "offload": "offload_model"}
_VAE = "the peers of `parallel` share its tiles; ae.placement bounds its memory"
LEFT = {
    "plugin_ae": _VAE,
    "plugin_config_ae": _VAE,
    "config_path": "not needed",
    "record_time": "the times are printed",
}
_UNPAID = Fixed((False, None), "", "Longtake sends nothing to paid services; write the prompt as it should be")
FIXED = {
    "dataset.type": Fixed(("text", None), "", "prompts are texts; `prompts` is the file they are in"),
    "sampling_option.temporal_reduction": Fixed((4, None), "", "the autoencoder says it: 4 frames to a latent one"),
}


def translate_inference(work: Translation) -> None:
    work.drop_none(("plugin_config", "plugin_config_ae", "seed"))
    translate_model(work)
    translate_plugin(work, world_size=world_size())
    translate_lora(work)
    work.move(ALIASES, wins=True)
    work.move(MOVED)
    work.leave(LEFT)
    work.fix({**FIXED, **dict.fromkeys(("prompt_refine", "refine_prompt"), _UNPAID)})
    work.refuse_rest("dataset", ("type", "data_path"))
