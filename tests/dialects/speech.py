"""What the tests of Open-Sora's words need: run files in the old vocabulary, and what becomes of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from longtake.config.faults import ConfigError
from longtake.dialects.opensora_v2 import OpenSora
from longtake.generate.config import GenerateConfig
from longtake.generate.source import resolve_source
from longtake.train.config import RunConfig
from longtake.train.run_file import read_run

ROOT = Path(__file__).resolve().parents[2]

# A training file as one would have written it for Open-Sora 2.0, of stage 2 with known frames.
TRAINING = """
_video = {5: (1.0, 8), 9: (1.0, 8), 13: (1.0, 8), 17: (1.0, 8), 21: (1.0, 8), 25: (1.0, 8), 29: (1.0, 8), 33: (1.0, 8)}
bucket_config = {"256px": {1: (1.0, 195), **_video}, "768px": {1: (0.5, 38), 33: ((0.5, 0.5), 10)}}
condition_config = dict(t2v=1, i2v_head=5, i2v_loop=1, i2v_tail=1)
dataset = dict(type="video_text", transform_name="resize_crop", fps_max=24, vmaf=True)
is_causal_vae = True

grad_ckpt_buffer_size = 25 * 2**30  # elements
plugin = "hybrid"
plugin_config = dict(
    tp_size=1, pp_size=1, sp_size=4, sequence_parallelism_mode="ring_attn", enable_sequence_parallelism=True,
    static_graph=True, zero_stage=2, reduce_bucket_size_in_m=128, overlap_allgather=False,
)
pin_memory_cache_pre_alloc_numels = [(260 + 20) * 1024 * 1024] * 24 + [(34 + 20) * 1024 * 1024] * 4
num_bucket_build_workers = 64
grad_checkpoint = True

model = dict(
    type="flux", from_pretrained=None, strict_load=False, guidance_embed=False, fused_qkv=False, use_liger_rope=True,
    grad_ckpt_settings=(100, 100), in_channels=64, vec_in_dim=768, context_in_dim=4096, hidden_size=3072,
    mlp_ratio=4.0, num_heads=24, depth=19, depth_single_blocks=38, axes_dim=[16, 56, 56], theta=10_000,
    qkv_bias=True, cond_embed=True,
)
dropout_ratio = {"t5": 0.31622777, "clip": 0.31622777}
ae = dict(
    type="hunyuan_vae", from_pretrained="ckpts/hunyuan_vae.safetensors", in_channels=3, out_channels=3,
    layers_per_block=2, latent_channels=16, use_spatial_tiling=True, use_temporal_tiling=False,
)
t5 = dict(type="text_embedder", from_pretrained="google/t5-v1_1-xxl", cache_dir="x", max_length=512, shardformer=True)
clip = dict(type="text_embedder", from_pretrained="openai/clip-vit-large-patch14", cache_dir="x", max_length=77)

lr = 5e-5
eps = 1e-15
optim = dict(cls="HybridAdam", lr=lr, eps=eps, weight_decay=0.0, adamw_mode=True)
warmup_steps = 0
update_warmup_steps = True
grad_clip = 1.0
accumulation_steps = 1
ema_decay = None
prefetch_factor = 2
num_workers = 12
dtype = "bf16"
async_io = False
seed = 42
outputs = "outputs"
epochs = 1000
log_every = 10
ckpt_every = 200
keep_n_latest = 20
wandb_project = "mmdit"
save_master_weights = True
load_master_weights = True
"""

# An inference file in the old words.
INFERENCE = """
save_dir = "samples"
seed = 42
batch_size = 1
dtype = "bf16"
cond_type = "t2v"
dataset = dict(type="text")
sampling_option = dict(
    resolution="256px", aspect_ratio="16:9", num_frames=129, num_steps=50, shift=True, temporal_reduction=4,
    is_causal_vae=True, guidance=7.5, guidance_img=3.0, text_osci=True, image_osci=True, scale_temporal_osci=True,
    method="i2v", seed=None,
)
motion_score = "4"
fps_save = 24
plugin = "hybrid"
plugin_config = dict(
    tp_size=1, pp_size=1, sp_size=8, sequence_parallelism_mode="ring_attn", enable_sequence_parallelism=True,
    static_graph=True, zero_stage=2, overlap_allgather=False,
)
plugin_ae = "hybrid"
plugin_config_ae = dict(tp_size=8, pp_size=1, sp_size=1, zero_stage=2, overlap_allgather=False)
model = dict(type="flux", from_pretrained="ckpts/Open_Sora_v2.safetensors", guidance_embed=False, cond_embed=True)
ae = dict(type="hunyuan_vae", from_pretrained="ckpts/hunyuan_vae.safetensors")
t5 = dict(type="text_embedder", from_pretrained="ckpts/google/t5-v1_1-xxl", max_length=512, shardformer=True)
clip = dict(type="text_embedder", from_pretrained="ckpts/openai/clip-vit-large-patch14", max_length=77)
"""


@dataclass
class Heard:
    """What was told of words that something else stands in the place of."""

    lines: list[str] = field(default_factory=list)

    def of(self, word: str) -> str:
        """The one line about a word."""
        (line,) = [line for line in self.lines if line.startswith((f"{word} ", f"{word}:"))]
        return line


def training(run: str | Path, *flags: str) -> tuple[RunConfig, Heard]:
    """The run that a training command line in the old words means."""
    heard = Heard()
    dialect = OpenSora(heard.lines.append)
    _, found, *words = dialect.command(["train", str(run), "--dataset.data-path", "x.parquet", *flags])
    return read_run(found, words, dialect=dialect).value, heard


def inference(run: str | Path, *flags: str) -> tuple[GenerateConfig, Heard]:
    """The generation that an inference command line in the old words means."""
    heard = Heard()
    dialect = OpenSora(heard.lines.append)
    _, found, *words = dialect.command(["generate", str(run), *flags])
    return resolve_source(found, words, dialect=dialect).config, heard


def refusal(speak: Any, *words: str | Path) -> str:
    """The sentence that a command line is refused with; one line for each fault."""
    with pytest.raises(ConfigError) as refused:
        speak(*words)
    return str(refused.value)


def write(folder: Path, text: str, name: str = "mine") -> Path:
    """A run file."""
    path = folder / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    return path
