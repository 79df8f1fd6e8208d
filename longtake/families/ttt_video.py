"""TTT-Video: CogVideoX-5B in segments of three seconds, each with a text of its own, for videos of up to a minute."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from longtake.contracts import LatentShape
from longtake.data.rules import SampleRules
from longtake.diffusion.config import VPredictionConfig
from longtake.families import cogvideox
from longtake.families.record import SECTIONS_FILE, Family, Text
from longtake.hub import published_facts
from longtake.models.ttt_video_config import TTTVideoConfig, sizes_of

# Behind the last text of a scene, before the first of the next. In this order they are tokens 32100 and 32101 of T5,
# rows of its table that the published weights were trained with.
SCENE_MARKS = "<end_scene>", "<start_scene>"
TEXT_LENGTH = 498  # tokens of a text where the published program trains one segment
ENCODED_FRAMES = 48  # that its autoencoder takes at once, of a segment
TINY_SEGMENT = 8  # latent frames; tiny clips have 16 and one


def segments_of(latent: LatentShape, segment_frames: int, num_frames: int) -> int:
    """Texts of a clip of so many frames."""
    return max(1, (latent(num_frames, 1, 1)[1] - 1) // segment_frames)


def segments(config: Any) -> Callable[[int], int]:
    """What counts the texts of a run's clips."""
    return partial(segments_of, config.ae.latent, config.model.segment_frames)


def tiny(model: Mapping[str, Any]) -> dict[str, Any]:
    """What shrinks the sections of a run."""
    parts = cogvideox.tiny(model)
    kept = ("from_pretrained", "num_layers", "num_attention_heads", "attention_head_dim", "out_channels", "patch_size")
    kept += ("text_embed_dim", "time_embed_dim", "grad_ckpt_buffer_size")
    sizes = {name: parts["model"][name] for name in kept if name in parts["model"]}
    return parts | {"model": {**sizes, "segment_frames": TINY_SEGMENT, "mini_batch_size": 4}}


def root(folder: str) -> dict[str, Any] | None:
    """What a folder of weights says of a run's sections: one that was written here, or that of a whole CogVideoX-5B. No
    other model's is one of ours by itself."""
    if (own := published_facts(folder, SECTIONS_FILE)) is not None:
        return own if own.get("model", {}).get("type") == TTT_VIDEO.name else None
    found, facts = cogvideox.root(folder), published_facts(f"{folder}/transformer")
    if found is None or facts is None:
        return None
    return {
        "model": sizes_of(facts, f"{folder}/transformer/config.json"),
        "ae": {**found["ae"], "encode_frames": ENCODED_FRAMES},
        "t5": {**found["t5"], "max_length": TEXT_LENGTH, "new_tokens": SCENE_MARKS},
        "objective": {**found["objective"], "spacing": "rescaled"},
    }


QUIRKS = {  # where two set a key the later one does
    "per_query_rates": "as last_row_rates, but as PyTorch's operations there have it: each query of a mini-batch reads "
    "by rates of its own; far slower, and last_row_rates goes before it",
    "last_row_rates": "in videos of several segments most tokens get the inner learning rate of another one, as the "
    "GPU kernels read it; such videos need a number of tokens that mini-batches divide",
    "bf16_rotations": "the rotary tables of attention are rounded to bfloat16",
    "kernel_eps": "eps of the inner norm is 1e-6 in place of 1e-8, as the GPU kernels have it in forward",
    "oscillating_guidance": "dynamic guidance goes by the timestep in place of the step, and so swings",
}
QUIRK_KEYS = {
    "per_query_rates": {"model": {"rates": "per_query"}},
    "last_row_rates": {"model": {"rates": "last_row"}},
    "bf16_rotations": {"model": {"rotations": "bfloat16"}},
    "kernel_eps": {"model": {"inner_eps": 1e-6}},
    "oscillating_guidance": {"sampling_option": {"guidance_rule": "dynamic"}},
}

TTT_VIDEO = Family(
    name="ttt_video",
    model=TTTVideoConfig,
    objectives=(VPredictionConfig,),
    objective={"spacing": "rescaled"},
    texts=(Text("t5", "text"),),
    weights="longtake.weights.ttt_video:FORMAT",
    guidance=cogvideox.GUIDANCE,
    segments=segments,
    scene_marks=SCENE_MARKS,
    quirks=QUIRKS,
    quirk_keys=QUIRK_KEYS,
    rules=lambda config: SampleRules(caption="plain"),
    sources={"*.jsonl": "longtake.families.ttt_video_data:open_embeddings"},
    in_training={"ae": {"scale_factor": 1.0}},  # as published; CogVideoX-5B has 0.7
    sampling={"solver": "dpmpp_2m_sde", "guidance": 6.0, "guidance_rule": "dynamic_by_step"},
    tiny=tiny,
    root=root,
)
