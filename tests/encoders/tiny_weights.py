"""Encoders of a few thousand random weights, saved by the libraries that the real ones are saved by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn

from longtake.encoders.files import flux_name
from longtake.encoders.wan_config import WanVAEConfig

WORDS = ("a", "red", "green", "blue", "circle", "square", "triangle", "moves", "left", "right", "up", "down", "on")
T5_DIM, CLIP_DIM = 16, 8
HUNYUAN = {"block_out_channels": (4, 4, 8, 8), "norm_num_groups": 2, "latent_channels": 4, "layers_per_block": 1}
FLUX = {"ch": 4, "ch_mult": (1, 1, 2, 2), "num_res_blocks": 1, "z_channels": 4, "norm_num_groups": 2}


def _randomise(module: nn.Module, seed: int) -> None:
    """Every parameter random, those too that start at zero or one; of a size that keeps signals alive."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            numbers = torch.randn(parameter.shape, generator=generator)
            is_scale = "norm" in name and name.endswith("weight")
            fan = parameter[0].numel() if parameter.dim() > 1 else 16
            parameter.copy_(1 + 0.1 * numbers if is_scale else numbers * fan**-0.5)


def tiny_t5(folder: Path, layers: int = 3, dim: int = T5_DIM) -> Any:
    """Writes a T5 encoder with a tokenizer of whole words into `folder`; returns transformers' model."""
    from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

    vocabulary = {word: i for i, word in enumerate(("<pad>", "</s>", "<unk>", *WORDS))}
    sizes = {"d_model": dim, "d_kv": 4, "d_ff": 24, "num_layers": layers, "num_heads": 4}
    model = T5EncoderModel(T5Config(vocab_size=len(vocabulary), feed_forward_proj="gated-gelu", **sizes)).eval()
    _randomise(model, 1)
    model.save_pretrained(folder)
    tokenizer = _word_tokenizer(vocabulary, "<unk>", "$A </s>", [("</s>", 1)])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    return model


def tiny_clip(folder: Path, dim: int = CLIP_DIM) -> Any:
    """Writes a CLIP text model, its padding the end token as in CLIP-L, into `folder`; returns transformers' model."""
    from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate((*WORDS, "<unk>", "<|startoftext|>", "<|endoftext|>"))}
    begin, end = len(vocabulary) - 2, len(vocabulary) - 1
    sizes = {"hidden_size": dim, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    special = {"bos_token_id": begin, "eos_token_id": end, "pad_token_id": end}
    config = CLIPTextConfig(vocab_size=len(vocabulary), max_position_embeddings=12, **sizes, **special)
    model = CLIPTextModel(config).eval()
    _randomise(model, 2)
    model.save_pretrained(folder)
    pieces = [("<|startoftext|>", begin), ("<|endoftext|>", end)]
    tokenizer = _word_tokenizer(vocabulary, "<unk>", "<|startoftext|> $A <|endoftext|>", pieces)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|endoftext|>",
        bos_token="<|startoftext|>",
        eos_token="<|endoftext|>",
        unk_token="<unk>",
    ).save_pretrained(folder)
    return model


def _word_tokenizer(vocabulary: dict[str, int], unknown: str, single: str, pieces: list[tuple[str, int]]) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=pieces)
    return tokenizer


def tiny_hunyuan(file: Path, prefix: str = "") -> Any:
    """Writes a HunyuanVideo autoencoder as one file; returns diffusers' model."""
    from diffusers import AutoencoderKLHunyuanVideo

    model = AutoencoderKLHunyuanVideo(**HUNYUAN).eval()
    _randomise(model, 3)
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({prefix + name: tensor.contiguous() for name, tensor in model.state_dict().items()}, file)
    return model


def tiny_wan(folder: Path, version: str) -> Any:
    """Writes one of Wan's autoencoders into `folder`, in diffusers' layout; returns diffusers' model."""
    from diffusers import AutoencoderKLWan

    sizes: dict[str, Any] = {"base_dim": 4, "num_res_blocks": 1}
    if version == "2.2":
        statistics = WanVAEConfig(version="2.2")
        sizes |= {"base_dim": 3, "decoder_base_dim": 4, "z_dim": 48, "is_residual": True, "patch_size": 2}
        sizes |= {"in_channels": 12, "out_channels": 12, "scale_factor_spatial": 16}
        sizes |= {"latents_mean": statistics.latents_mean, "latents_std": statistics.latents_std}
    model = AutoencoderKLWan(**sizes).eval()
    _randomise(model, 5)
    model.save_pretrained(folder)
    return model


def tiny_flux(file: Path) -> Any:
    """Writes a FLUX autoencoder as one file in the original's names and layout; returns diffusers' model."""
    from diffusers import AutoencoderKL

    model = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=tuple(FLUX["ch"] * factor for factor in FLUX["ch_mult"]),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=2,
        use_quant_conv=False,
        use_post_quant_conv=False,
    ).eval()
    _randomise(model, 4)
    state = {}
    for name, tensor in model.state_dict().items():
        is_projection = "attentions" in name and tensor.dim() == 2
        state[flux_name(name)] = (tensor[..., None, None] if is_projection else tensor).contiguous()
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(state, file)
    return model


def sections(folder: Path) -> dict[str, dict[str, Any]]:
    """Writes all three into `folder`; the sections `ae`, `t5` and `clip` of a config that uses them."""
    tiny_t5(folder / "t5")
    tiny_clip(folder / "clip")
    tiny_hunyuan(folder / "hunyuan_vae.safetensors")
    return {
        "ae": {
            "type": "hunyuan_vae",
            "from_pretrained": str(folder / "hunyuan_vae.safetensors"),
            "dtype": "fp32",
            **HUNYUAN,
        },
        "t5": {
            "type": "text_embedder",
            "from_pretrained": str(folder / "t5"),
            "dim": T5_DIM,
            "max_length": 10,
            "dtype": "fp32",
        },
        "clip": {
            "type": "text_embedder",
            "from_pretrained": str(folder / "clip"),
            "dim": CLIP_DIM,
            "max_length": 12,
            "dtype": "fp32",
        },
    }
