"""CogVideoX and CogVideoX-Fun: one sequence of text and video, v-prediction, T5, given frames or a control video."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longtake.data.rules import Companion, SampleRules
from longtake.diffusion.config import END_KINDS, VPredictionConfig, published_schedule
from longtake.encoders.autoencoder_config import CogVideoXVAEConfig
from longtake.families.cogvideox_sizes import COLLATE, FunSizes
from longtake.families.record import Family, Text
from longtake.families.tiny import TINY_CELL, TINY_LENGTH, TINY_WORDS, tiny_sections
from longtake.hub import published_facts
from longtake.models.cogvideox_config import PUBLISHED_CLASS, CogVideoXConfig, section_of

INPAINT = "inpaint"
# What pixel masks leave of a clip, for models that see a masked video; END_KINDS are kinds of theirs too.
MASK_KINDS = {
    INPAINT: "pixels that a mask leaves: in training one of those below, in CogVideoX-Fun's shares",
    "inpaint_box": "all but a box in every frame",
    "inpaint_all": "nothing, of which one sample in ten is told by a black video",
    "inpaint_head": "the first 1 to 4 frames, 4 in generation",
    "inpaint_ends": "the first and the last 1 to 4 frames, 4 in generation",
    "inpaint_span": "all but a box in frames that follow each other",
    "inpaint_dots": "every other pixel, by chance",
    "inpaint_blocks": "all but a small block in some frames",
    "inpaint_ellipse": "all but an ellipse in the first frame",
    "inpaint_circle": "all but a circle in the first frame",
    "inpaint_frames": "every other frame, by chance",
}
PIXELS = "pixels_of_collate"
QUIRKS = {
    PIXELS: "frames are scaled in fp32, bilinear in place of bicubic, and cut as that program does",
    COLLATE: "a large video has up to 4 frames more than its budget of tokens allows (13 for 9 at 1024 x 1024)",
}
GUIDANCE = {name: f"longtake.diffusion.guidance:{name}" for name in ("dynamic", "dynamic_by_step")}


def companions(model: CogVideoXConfig) -> tuple[Companion, ...]:
    """Return a control model's clips bring a control video."""
    return (Companion("control", "control", "video", "control", by_mean=True),) if model.visual == "control" else ()


def rules(config: Any) -> SampleRules:
    """Captions say what they say; pictures are cut to their bucket, but for a run that scales them."""
    sizes, pixels = getattr(config, "sizes", None), "bytes"
    if sizes is not None and sizes.crop == "none":
        pixels = "whole"
    elif PIXELS in config.quirks:
        pixels = "longtake.families.cogvideox_pixels:collated"
    return SampleRules(caption="plain", pixels=pixels)


def tiny(model: Mapping[str, Any]) -> dict[str, Any]:
    """What shrinks the sections of a run. Latent frames are frames, and patches have one, so that any length fits."""
    patch = model.get("patch_size", 2)
    side = TINY_CELL // patch
    sizes: dict[str, Any] = {
        "num_layers": 2,
        "num_attention_heads": 8,  # for up to 8 peers
        "attention_head_dim": 16,
        "out_channels": 3 * side**2,
        "text_embed_dim": TINY_WORDS,
        "max_text_seq_length": TINY_LENGTH,
        "time_embed_dim": 32,
        "patch_size": patch,
        "patch_size_t": None,
        "sample_height": 2 * patch,
        "sample_width": 2 * patch,
        "sample_frames": 17,
        "temporal_compression_ratio": 1,
    }
    if model.get("ofs_embed_dim"):
        sizes["ofs_embed_dim"] = sizes["time_embed_dim"]
    return tiny_sections(model, sizes, side)


def root(folder: str) -> dict[str, Any] | None:
    """What the folder of a whole CogVideoX or CogVideoX-Fun says of a run's sections.

    CogVideoX-Fun trains on the schedule without its shift, decodes the first latent frame alone, and does not invert
    the scale of known latents, whatever the files say that it took over from CogVideoX.
    """
    facts = published_facts(f"{folder}/transformer")
    if facts is None or facts.get("_class_name") != PUBLISHED_CLASS:
        return None
    model = section_of(facts, f"{folder}/transformer/config.json")
    of_fun, vae = model["positions"] == "fun", published_facts(f"{folder}/vae") or {}
    # Text-to-video weights may start any other model, and those of CogVideoX one of CogVideoX-Fun.
    left_open = ("visual",) * (model["visual"] is None) + ("positions",) * (not of_fun)
    schedule = published_facts(f"{folder}/scheduler", "scheduler_config.json")
    published = CogVideoXVAEConfig.PUBLISHED
    return {
        "model": {key: value for key, value in model.items() if key not in left_open},
        "ae": {
            "type": "cogvideox_vae",
            "from_pretrained": f"{folder}/vae",
            **{ours: vae[theirs] for theirs, ours in published.items() if theirs in vae},
            "first_latent_alone": of_fun,
            **({"invert_scale_latents": False} if of_fun else {}),
        },
        "t5": {
            "type": "text_embedder",
            "from_pretrained": f"{folder}/text_encoder",
            "max_length": facts.get("max_text_seq_length", 226),
            "dim": facts.get("text_embed_dim", 4096),
        },
        "objective": {
            "type": "v_prediction",
            "from_pretrained": f"{folder}/scheduler",
            **({} if schedule is None else published_schedule(schedule, f"{folder}/scheduler/scheduler_config.json")),
            **({"snr_shift": 1.0} if of_fun else {}),
        },
    }


COGVIDEOX = Family(
    name="cogvideox",
    model=CogVideoXConfig,
    objectives=(VPredictionConfig,),
    texts=(Text("t5", "text"),),
    weights="longtake.weights.cogvideox:FORMAT",
    known="longtake.families.cogvideox_known:law",
    kinds={**END_KINDS, **MASK_KINDS},
    guidance=GUIDANCE,
    rules=rules,
    quirks=QUIRKS,
    bucket_law=lambda quirks: "cogvideox_fun",
    sizes=FunSizes,
    companions=companions,
    sampling={"solver": "ddim", "guidance": 6.0, "aspect_ratio": "0.57"},
    tiny=tiny,
    root=root,
)
