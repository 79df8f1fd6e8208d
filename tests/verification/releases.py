"""Tiny releases of the five families, as diffusers, transformers and the published programs save them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from longtake.encoders.wan_names import wan_names
from longtake.models.stdit3 import STDiT3
from longtake.models.stdit3_config import STDiT3Config
from longtake.models.wan import Wan
from longtake.models.wan_config import WanConfig
from longtake.weights.conversion import ConvertedWeights
from longtake.weights.files import save_weights
from longtake.weights.format import STEM_OF_DIFFUSERS, WeightLayout
from longtake.weights.stdit3 import FORMAT as STDIT3
from longtake.weights.wan import DIFFUSERS, OFFICIAL
from longtake.weights.wan import FORMAT as WAN
from tests.encoders.test_opensora_v1_2 import FOLDER as GOLDEN_V1_2
from tests.encoders.test_opensora_v1_2 import SIZES as VAE_V1_2
from tests.encoders.tiny_weights import HUNYUAN, tiny_clip, tiny_hunyuan, tiny_t5, tiny_wan
from tests.models.golden import read_golden, weights_path
from tests.models.golden_wan import FOLDER as GOLDEN_WAN
from tests.weights.saved import save_model

TEXT_LENGTH, TEXT_DIM = 10, 16
CLIP_DIM = 8
WAN_TEXT_DIM = 24  # of the golden UMT5
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


def _wan_denoiser(folder: Path, layout: WeightLayout, **keys: Any) -> Tree:
    sizes = {
        "num_layers": 2,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "ffn_dim": 40,
        "text_dim": WAN_TEXT_DIM,
        "text_len": TEXT_LENGTH,
        "freq_dim": 32,
        **keys,
    }
    config = WanConfig(**sizes)
    tensors = ConvertedWeights(WAN, _randomise(Wan(config)).state_dict(), config, layout)
    facts = json.dumps(WAN.folders[layout.names](config))
    save_weights(tensors, folder, stem=STEM_OF_DIFFUSERS, beside={"config.json": facts})
    return {"type": "wan", "from_pretrained": str(folder), "text_dim": WAN_TEXT_DIM, "text_len": TEXT_LENGTH}


def _umt5(place: Path) -> Tree:
    tokenizer = str(GOLDEN_WAN / "text" / "tokenizer")
    section = {"type": "umt5", "from_pretrained": str(place), "dim": WAN_TEXT_DIM, "dtype": "fp32"}
    return {**section, "max_length": TEXT_LENGTH, "tokenizer": tokenizer}


def wan(folder: Path) -> Tree:
    """Wan 2.1 T2V as its authors publish it: one folder of denoiser, autoencoder and UMT5, the last two as `.pth`."""
    model = _wan_denoiser(folder / "Wan2.1", OFFICIAL)
    vae, official = tiny_wan(folder / "vae", "2.1").state_dict(), wan_names("2.1", num_res_blocks=1)
    ae_file = folder / "Wan2.1" / "Wan2.1_VAE.pth"
    torch.save({official(name): tensor for name, tensor in vae.items()}, ae_file)
    text, names = load_file(GOLDEN_WAN / "text" / "model.safetensors"), GOLDEN_WAN / "umt5_names.json"
    text_folder = folder / "umt5"
    text_folder.mkdir()
    text_file = text_folder / "models_t5_umt5-xxl-enc-bf16.pth"
    torch.save({theirs: text[ours] for theirs, ours in json.loads(names.read_text())["umt5"]}, text_file)
    shutil.copy(GOLDEN_WAN / "text" / "config.json", text_folder)  # published sizes otherwise
    ae = {"type": "wan", "from_pretrained": str(ae_file), "dtype": "fp32", "base_dim": 4, "num_res_blocks": 1}
    return {"model": model, "ae": ae, "t5": _umt5(text_file)}


def wan_ti2v(folder: Path) -> Tree:
    """Wan 2.2 TI2V in the layout of diffusers."""
    tiny_wan(folder / "vae", "2.2")
    sizes = {"in_channels": 48, "out_channels": 48, "known_frames": True}
    return {
        "model": _wan_denoiser(folder / "transformer", DIFFUSERS, **sizes),
        "ae": {"type": "wan", "from_pretrained": str(folder / "vae"), "dtype": "fp32"},
        "t5": _umt5(GOLDEN_WAN / "text"),
        "bucket_config": {"64px": {9: (1.0, 1)}},
        "condition_config": {"t2v": 1.0, "i2v_head": 1.0},
    }


RELEASES: dict[str, Callable[..., Tree]] = {
    "cogvideox": cogvideox,
    "ttt_video": ttt_video,
    "opensora_v2": opensora_v2,
    "opensora_v1_2": opensora_v1_2,
    "wan": wan,
    "wan_ti2v": wan_ti2v,
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
