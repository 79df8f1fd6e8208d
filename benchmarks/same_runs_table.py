"""The runs of `same_runs.py`: their config files, and the clips that they train on."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import av
import numpy as np

CLIPS, IMAGES, STORIES = 32, 8, 12
KINDS = '"t2v": 1, "i2v_head": 2, "i2v_tail": 1, "i2v_loop": 1'
Recompute = Literal["none", "selective", "full"]

BASE = """
seed = 7
dtype = "fp32"
device = "cpu"
dataset = dict(data_path="clips/clips.parquet", cache_mb=16)
t5 = dict(type="words", dim=16, max_length=8)
outputs = "outputs"
lr = 3e-3
eps = 1e-8
warmup_steps = 1
ema_decay = 0.9
slots_per_step = 4
num_workers = 0
tensorboard = False
max_steps = 4
sampling_option = dict(num_steps=2)
"""

# Widths divide by two heads, and not evenly by all of them: shards of two ranks differ in size.
FAMILIES = {
    "mmdit": """
bucket_config = {"32px": {1: (1.0, 4), 8: (0.9, 3), 16: (1.0, 2)}}
ae = dict(type="pixel", temporal=8, spatial=8)
clip = dict(type="words", dim=16, max_length=8)
model = dict(
    type="flux", in_channels=1536, patch_size=1, hidden_size=36, num_heads=2, axes_dim=(6, 6, 6), depth=1,
    depth_single_blocks=2, vec_in_dim=16, context_in_dim=16, fused_qkv=True,
)
objective = dict(predict="clean", shift=None)
dropout_ratio = dict(t5=0.2, clip=0.2)
sampling_option = dict(resolution="32px", aspect_ratio="1:1", num_frames=8, guidance=2.0)
""",
    "stdit3": """
bucket_config = {"16x16": {1: (1.0, 4), 4: (0.9, 3), 8: (1.0, 2)}}
condition_config = dict(identity=0.4, image_head=0.2, image_head_tail=0.1, random=0.3)
ae = dict(type="pixel", temporal=1, spatial=4)
model = dict(
    type="stdit3", in_channels=48, hidden_size=36, depth=2, num_heads=2, patch_size=(1, 2, 2), caption_channels=16,
    model_max_length=8, input_sq_size=16,
)
objective = dict(type="flow_1000", transform_scale=144.0)
dropout_ratio = dict(t5=0.2)
sampling_option = dict(resolution="16x16", aspect_ratio="1:1", num_frames=8, guidance=2.0)
""",
    "cogvideox": """
bucket_config = {"32px": {4: (1.0, 4), 8: (1.0, 2)}}
condition_config = dict(t2v=2, i2v_head=1)
ae = dict(type="pixel", temporal=1, spatial=4)
model = dict(
    type="cogvideox", visual="inpaint", num_layers=2, num_attention_heads=2, attention_head_dim=16, out_channels=48,
    text_embed_dim=16, max_text_seq_length=8, time_embed_dim=20, patch_size=2, patch_size_t=2, sample_height=8,
    use_rotary_positional_embeddings=True, use_learned_positional_embeddings=False, sample_width=8, sample_frames=8,
    temporal_compression_ratio=1,
)
objective = dict(type="v_prediction", snr_shift=3.0)
dropout_ratio = dict(t5=0.2)
sampling_option = dict(resolution="32px", aspect_ratio="1:1", num_frames=8, guidance=2.0)
""",
    "ttt_video": """
dataset = dict(data_path="clips/stories.parquet")
bucket_config = {"16px": {14: (1.0, 2)}}
ae = dict(type="pixel", temporal=2, spatial=4)
model = dict(
    type="ttt_video", mixer="ttt_mlp", mini_batch_size=16, num_layers=2, num_attention_heads=2, attention_head_dim=16,
    out_channels=96, text_embed_dim=16, time_embed_dim=20, patch_size=1, segment_frames=2,
)
objective = dict(type="v_prediction", snr_shift=3.0)
dropout_ratio = dict(t5=0.2)
slots_per_step = 1
sampling_option = dict(resolution="16px", aspect_ratio="1:1", num_frames=14, guidance=2.0)
""",
}
PROMPTS = {"ttt_video": json.dumps(["a square", "then it moves", "then it is gone"])}
NUM_BLOCKS = {"mmdit": (1, 2), "stdit3": (2, 2), "cogvideox": (2,), "ttt_video": (2,)}


@dataclass(frozen=True)
class Run:
    """A run of `FAMILIES`, with changes to its config file."""

    family: str
    changes: str = ""
    steps: int = 4
    processes: int = 1
    restart: int | None = None  # stop after this step, then resume
    recompute: Recompute | None = None
    store: bool = False  # train on latents that are encoded first
    generate: bool = False  # a video with the trained weights
    stages: tuple[str, ...] = ()


def _runs() -> dict[str, Run]:
    runs = {}
    for family in FAMILIES:
        runs[family] = Run(family, generate=True)
        runs[f"{family}, restart"] = Run(family, restart=2)
        runs[f"{family}, fsdp"] = Run(family, "parallel = dict(shard=2)", processes=2)
        runs[f"{family}, tensor"] = Run(family, "parallel = dict(tensor=2)", processes=2)
        runs[f"{family}, sequence"] = Run(family, "parallel = dict(sequence=2)", processes=2)
        runs[f"{family}, lora"] = Run(family, "lora = dict(rank=2, alpha=4)")
        runs[f"{family}, full recomputation"] = Run(family, recompute="full")
    return runs


RUNS: Mapping[str, Run] = {
    **_runs(),
    "image to video": Run(
        "mmdit",
        f"""
condition_config = {{{KINDS}, "v2v_head": 1, "v2v_tail": 1}}
no_i2v_ref_loss = True
ae = dict(temporal=1)
model = dict(in_channels=192, cond_embed=True, fused_qkv=False)
objective = dict(predict="velocity", shift="resolution")
optim = dict(weight_decay=0.01, betas=(0.9, 0.98))
grad_clip = 0.5
num_workers = 1
""",
        recompute="selective",
    ),
    "stored latents": Run(
        "mmdit",
        f"""
condition_config = {{{KINDS}}}
model = dict(cond_embed=True)
dataset = dict(captions=dict(text=0.5, short=0.5), views=2)
""",
        store=True,
    ),
    "int8 base": Run("mmdit", 'lora = dict(rank=2, alpha=4, dora=True, base="int8")'),
    "lora, fsdp": Run("mmdit", "lora = dict(rank=2, alpha=4)", processes=2, restart=2),
    "ring": Run("mmdit", 'parallel = dict(sequence=2, sequence_attention="ring")', processes=2),
    "ttt_linear": Run("ttt_video", 'model = dict(mixer="ttt_linear", directions="parallel")'),
    "curriculum": Run(
        "mmdit",
        """
stages = [
    dict(name="images", bucket_config={"32px": {"_delete_": True, 1: (1.0, 4)}}, max_steps=2),
    dict(name="clips", lr=1e-3, use_cosine_scheduler=True, max_steps=2),
    dict(name="adapters", lora=dict(rank=3, alpha=3), accumulation_steps=2, slots_per_step=None, max_steps=2),
]
""",
        steps=6,
        stages=("images", "clips", "adapters"),
    ),
}


def recomputation(family: str, level: Recompute, names_level: bool) -> str:
    """Line of a config file. names_level: whether the tree has the key `model.recompute`."""
    if names_level:
        return f"model = dict(recompute={level!r})"
    if level == "none":
        return ""
    budget = {"selective": "attention", "full": "inputs"}[level]
    return f"model = dict(grad_ckpt_settings={NUM_BLOCKS[family]}, grad_ckpt_budget={budget!r})"


def write_clips(folder: Path) -> None:
    """Write squares that move over a grey ground, and their tables: the same pixels on every machine.

    `clips.csv` has videos and images with two captions; `stories.csv` has videos of three scenes.
    """
    folder.mkdir()
    random = np.random.default_rng(0)
    rows, stories = [], []
    for number in range(CLIPS + IMAGES):
        height, width = ((32, 32), (24, 40))[int(random.integers(4) == 0)]
        length = int(random.integers(18, 21) if random.integers(3) == 0 else random.integers(10, 13))
        length = length if number < CLIPS else 1
        name = f"{number:03d}.{'mp4' if number < CLIPS else 'png'}"
        caption, place = _write_square(folder / name, random, length, height, width)
        rows.append((name, f"{caption} from {place}", caption))
    for number in range(STORIES):
        name = f"story{number:02d}.mp4"
        caption, place = _write_square(folder / name, random, 14, 16, 16)
        stories.append((name, json.dumps([caption, f"then it is at {place}", "then it moves"])))
    for name, head, lines in (("clips", ("path", "text", "short"), rows), ("stories", ("path", "text"), stories)):
        with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([head, *lines])


def _write_square(path: Path, random: np.random.Generator, length: int, height: int, width: int) -> tuple[str, str]:
    """Write one clip. Returns its caption and where the square starts."""
    colour = random.integers(0, 255, 3, dtype=np.uint8)
    x, y = int(random.integers(2, width // 3)), int(random.integers(2, height // 3))
    side = height // 4
    frames = np.full((length, height, width, 3), random.integers(40, 190, dtype=np.uint8))
    for index, frame in enumerate(frames):
        frame[y : y + side, x + index // 2 : x + index // 2 + side] = colour
    codec, pixels = ("mpeg4", "yuv420p") if path.suffix == ".mp4" else ("png", "rgb24")
    with av.open(str(path), "w", format=None if path.suffix == ".mp4" else "image2", options={}) as file:
        stream = file.add_stream(codec, rate=8)
        stream.height, stream.width = height, width
        stream.pix_fmt, stream.codec_context.thread_count = pixels, 1
        for frame in frames:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        file.mux(stream.encode())
    return f"a square of {['red', 'green', 'blue'][int(colour.argmax())]}", f"{x} {y}"
