"""Tiny releases of the four families, as diffusers, transformers and the published programs save them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from longtake.models.stdit3 import STDiT3
from longtake.models.stdit3_config import STDiT3Config
from longtake.weights.stdit3 import FORMAT as STDIT3
from tests.encoders.test_opensora_v1_2 import FOLDER as GOLDEN_V1_2
from tests.encoders.test_opensora_v1_2 import SIZES as VAE_V1_2
from tests.encoders.tiny_weights import HUNYUAN, tiny_clip, tiny_hunyuan, tiny_t5
from tests.models.golden import read_golden, weights_path
from tests.weights.saved import save_model

TEXT_LENGTH, TEXT_DIM = 10, 16
CLIP_DIM = 8
BUCKET = {"32px": {9: (1.0, 1)}}
Tree = dict[str, Any]


def _randomise(module: nn.Module, seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return module.eval()


def _cogvideox_folder(folder: Path, **sizes: Any) -> None:
    """A whole pipeline's folder, without its schedule."""
    from diffusers import AutoencoderKLCogVideoX, CogVideoXTransformer3DModel

    transformer = CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        time_embed_dim=32,
        text_embed_dim=TEXT_DIM,
        num_layers=2,
        sample_width=4,
        sample_height=4,
        sample_frames=9,
        max_text_seq_length=TEXT_LENGTH,
        **sizes,
    )
    _randomise(transformer).save_pretrained(folder / "transformer")
    levels = 4
    vae = AutoencoderKLCogVideoX(
        down_block_types=("CogVideoXDownBlock3D",) * levels,
        up_block_types=("CogVideoXUpBlock3D",) * levels,
        block_out_channels=(4, 8, 8, 8),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=4,
    )
    _randomise(vae, 1).save_pretrained(folder / "vae")
    tiny_t5(folder / "text_encoder", dim=TEXT_DIM)


def _t5(folder: Path, **keys: Any) -> Tree:
    return {"type": "text_embedder", "from_pretrained": str(folder), "dim": TEXT_DIM, "dtype": "fp32", **keys}


def cogvideox(folder: Path, **sizes: Any) -> Tree:
    """CogVideoX-2B's format; with `use_rotary_positional_embeddings` 5B's."""
    _cogvideox_folder(folder, **sizes)
    return {
        "model": {"type": "cogvideox", "from_pretrained": str(folder / "transformer")},
        "ae": {"type": "cogvideox_vae", "from_pretrained": str(folder / "vae"), "dtype": "fp32"},
        "t5": _t5(folder / "text_encoder", max_length=TEXT_LENGTH),
    }


def ttt_video(folder: Path) -> Tree:
    """Start of TTT-Video: CogVideoX-5B's folder, its mixers new."""
    _cogvideox_folder(folder, use_rotary_positional_embeddings=True)
    return {
        "model": {
            "type": "ttt_video",
            "from_pretrained": str(folder / "transformer"),
            "segment_frames": 2,
            "mini_batch_size": 4,
        },
        "ae": {
            "type": "cogvideox_vae",
            "from_pretrained": str(folder / "vae"),
            "dtype": "fp32",
            "scale_factor": 1.0,
            "encode_frames": 48,
        },
        "t5": _t5(folder / "text_encoder", max_length=TEXT_LENGTH),
    }


def opensora_v2(folder: Path) -> Tree:
    """The published names in one file, written by the published program, with known frames; the autoencoder and text
    encoders by diffusers and transformers."""
    config = read_golden("mmdit_split_cases")[0]["config"]
    names = {name: tensor for name, tensor in load_file(weights_path("split")).items() if "guidance_in" not in name}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(names, folder / "Open_Sora_v2.safetensors")
    tiny_t5(folder / "t5", dim=config["context_in_dim"])
    tiny_clip(folder / "clip", dim=config["vec_in_dim"])
    tiny_hunyuan(folder / "hunyuan_vae.safetensors")
    own = {"fused_qkv": False, "use_liger_rope": True, "cond_embed": True}
    return {
        "model": {
            "type": "flux",
            "from_pretrained": str(folder / "Open_Sora_v2.safetensors"),
            **config,
            "axes_dim": tuple(config["axes_dim"]),
            **own,
        },
        "ae": {
            "type": "hunyuan_vae",
            "from_pretrained": str(folder / "hunyuan_vae.safetensors"),
            "dtype": "fp32",
            **HUNYUAN,
        },
        "t5": _t5(folder / "t5", max_length=TEXT_LENGTH, dim=config["context_in_dim"]),
        "clip": _t5(folder / "clip", max_length=12, dim=config["vec_in_dim"]),
    }


def opensora_v1_2(folder: Path) -> Tree:
    """STDiT3 in its published names; the autoencoder written by the published program."""
    sizes = {
        "in_channels": 4,
        "hidden_size": 32,
        "depth": 2,
        "num_heads": 4,
        "caption_channels": TEXT_DIM,
        "model_max_length": TEXT_LENGTH,
        "input_sq_size": 32,
    }
    config = STDiT3Config(**sizes)
    model = _randomise(STDiT3(config))
    save_model(STDIT3, model.state_dict(), config, folder / "stdit3", STDIT3.own(config))
    parts = [load_file(GOLDEN_V1_2 / f"vae_{name}_weights.safetensors") for name in ("spatial", "temporal")]
    save_file({name: tensor for part in parts for name, tensor in part.items()}, folder / "vae.safetensors")
    tiny_t5(folder / "t5", dim=TEXT_DIM)
    return {
        "model": {"type": "stdit3", "from_pretrained": str(folder / "stdit3"), **sizes},
        "ae": {
            "type": "opensora_vae_v1_2",
            "from_pretrained": str(folder / "vae.safetensors"),
            "dtype": "fp32",
            **VAE_V1_2,
        },
        "t5": _t5(folder / "t5", max_length=TEXT_LENGTH, mask=True),
        "bucket_config": {"144p": {9: (1.0, 1)}},
    }


RELEASES: dict[str, Callable[..., Tree]] = {
    "cogvideox": cogvideox,
    "ttt_video": ttt_video,
    "opensora_v2": opensora_v2,
    "opensora_v1_2": opensora_v1_2,
}


def write_run(folder: Path, sections: Tree) -> Path:
    """The run file of a release."""
    keys = {
        "device": "cpu",
        "dtype": "fp32",
        "bucket_config": BUCKET,
        "lr": 1e-4,
        "num_workers": 0,
        "tensorboard": False,
        **sections,
    }
    path = folder / "run.py"
    path.write_text("".join(f"{key} = {value!r}\n" for key, value in keys.items()), encoding="utf-8")
    return path
