"""The denoisers of diffusers as references: the same weights, called as ours are called.

A format names its builder in `Format.reference`. Modules are in float32 on the CPU, their activations recomputed in
backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longtake.contracts import Conditions
from longtake.hub import published_facts
from longtake.models.cogvideox import OFFSET
from longtake.models.cogvideox_config import PUBLISHED_CLASS, published_config
from longtake.models.layers import patchify, unpatchify
from longtake.models.wan_config import published_config as wan_config
from longtake.weights import cogvideox as cogvideox_weights
from longtake.weights import mmdit as mmdit_weights
from longtake.weights import wan as wan_weights
from longtake.weights.conversion import ConvertedWeights

LatentSize = tuple[int, int, int, int]  # (C, F, h, w)


@dataclass(frozen=True)
class ReferenceDenoiser:
    """A library's denoiser. `latent`: a size at which both programs place tokens alike."""

    name: str
    module: nn.Module
    latent: LatentSize
    predict: Callable[[Tensor, Tensor, Conditions], Tensor]  # as `Denoiser.forward`
    naming: str  # of the module's parameters, in the format


def cogvideox(config: Any, state: Mapping[str, Tensor], path: Path) -> ReferenceDenoiser:
    """Build diffusers' CogVideoX, which reads the folder itself where `path` is one of diffusers; else filled with
    `state`.

    At the model's own rows and columns CogVideoX-Fun's positions are those of diffusers. A learned table is compared
    at its own length, the only one at which diffusers uses it.
    """
    from diffusers import CogVideoXPipeline, CogVideoXTransformer3DModel

    folder = path / "transformer" if (path / "transformer").is_dir() else path
    facts = published_facts(str(folder)) if folder.is_dir() else None
    if facts is not None and facts.get("_class_name") == PUBLISHED_CLASS:
        module = CogVideoXTransformer3DModel.from_pretrained(str(folder), torch_dtype=torch.float32)
    else:
        keys = {key: value for key, value in published_config(config).items() if key != "_class_name"}
        module = CogVideoXTransformer3DModel.from_config(keys)
        target = cogvideox_weights.DIFFUSERS
        module.load_state_dict(dict(ConvertedWeights(cogvideox_weights.FORMAT, state, config, target)))
    module = _recomputing(module)
    frames = config.base_grid[0] * config.patch[0] if config.use_learned_positional_embeddings else 2
    stand_in = SimpleNamespace(vae_scale_factor_spatial=1, transformer=module)

    def predict(x: Tensor, t: Tensor, conditions: Conditions) -> Tensor:
        beside = [conditions[name] for name in config.conditions if name != "text"]
        channels = module.config.in_channels  # a model that was grown reads zeros beyond these
        joined = torch.cat([x, *beside], dim=1)[:, :channels].transpose(1, 2)
        rotations = None
        if config.use_rotary_positional_embeddings:
            rotations = CogVideoXPipeline._prepare_rotary_positional_embeddings(
                stand_in, x.shape[3], x.shape[4], x.shape[2], x.device
            )
        return module(
            hidden_states=joined,
            encoder_hidden_states=conditions["text"],
            timestep=t,
            ofs=torch.full_like(t, OFFSET) if config.ofs_embed_dim else None,
            image_rotary_emb=rotations,
            return_dict=False,
        )[0].transpose(1, 2)

    latent = config.out_channels, frames, config.sample_height, config.sample_width
    return ReferenceDenoiser("diffusers CogVideoXTransformer3DModel", module, latent, predict, "diffusers")


def mmdit(config: Any, state: Mapping[str, Tensor], path: Path) -> ReferenceDenoiser | None:
    """Build diffusers' FLUX, at video positions; None where that class fixes what the config sets otherwise.

    Known frames enter through a wider first layer: `img_in` and `cond_in` are one matrix of both inputs.
    """
    if not config.qkv_bias or config.theta != 10_000 or config.mlp_ratio != 4:
        return None
    from diffusers import FluxTransformer2DModel

    tensors = dict(ConvertedWeights(mmdit_weights.FORMAT, state, config, mmdit_weights.DIFFUSERS))
    if config.cond_embed:
        weight, bias = tensors.pop("cond_in.weight"), tensors.pop("cond_in.bias")
        tensors["x_embedder.weight"] = torch.cat([tensors["x_embedder.weight"], weight], dim=1)
        tensors["x_embedder.bias"] = tensors["x_embedder.bias"].float() + bias.float()  # files hold bf16
    module = FluxTransformer2DModel(
        patch_size=1,
        in_channels=tensors["x_embedder.weight"].shape[1],
        out_channels=config.in_channels,
        num_layers=config.depth,
        num_single_layers=config.depth_single_blocks,
        attention_head_dim=config.head_dim,
        num_attention_heads=config.num_heads,
        joint_attention_dim=config.context_in_dim,
        pooled_projection_dim=config.vec_in_dim,
        guidance_embeds=config.guidance_embed,
        axes_dims_rope=tuple(config.axes_dim),
    )
    module.load_state_dict(tensors)
    module = _recomputing(module)

    def predict(x: Tensor, t: Tensor, conditions: Conditions) -> Tensor:
        patch, size = config.patch_size, x.shape[2:]
        axes = (torch.arange(n, device=x.device) for n in (size[0], size[1] // patch, size[2] // patch))
        places = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 3).float()
        parts = [patchify(x, patch)]
        if config.cond_embed:
            parts.append(patchify(conditions["visual"], patch))
        out = module(
            hidden_states=torch.cat(parts, dim=-1),
            encoder_hidden_states=conditions["text"],
            pooled_projections=conditions["vector"],
            timestep=t,
            img_ids=places,
            txt_ids=torch.zeros(conditions["text"].shape[1], 3, device=x.device),
            guidance=conditions["guidance"] if config.guidance_embed else None,
            return_dict=False,
        )[0]
        return unpatchify(out, size, patch)

    latent = config.latent_channels, 3, 8 * config.patch_size, 12 * config.patch_size
    return ReferenceDenoiser("diffusers FluxTransformer2DModel", module, latent, predict, "diffusers")


def wan(config: Any, state: Mapping[str, Tensor], path: Path) -> ReferenceDenoiser | None:
    """Build diffusers' Wan with the same weights. Text is padded to `text_len` rows, as its pipeline does."""
    from diffusers import WanTransformer3DModel

    if config.image_dim is not None and config.text_len != 512:
        return None  # where that class parts CLIP tokens from text
    module = WanTransformer3DModel.from_config({k: v for k, v in wan_config(config).items() if k != "_class_name"})
    module.load_state_dict(dict(ConvertedWeights(wan_weights.FORMAT, state, config, wan_weights.DIFFUSERS)))
    module = _recomputing(module)

    def predict(x: Tensor, t: Tensor, conditions: Conditions) -> Tensor:
        text = conditions["text"]
        made, visual = conditions.get("x_mask"), conditions.get("visual")
        if made is not None:
            tokens = x.shape[3] * x.shape[4] // 4
            t = (t[:, None] * made).repeat_interleave(tokens, dim=1)
        return module(
            hidden_states=x if visual is None else torch.cat([x, visual], dim=1),
            timestep=t,
            encoder_hidden_states=F.pad(text, (0, 0, 0, config.text_len - text.shape[1])),
            encoder_hidden_states_image=conditions.get("image"),
            return_dict=False,
        )[0]

    latent = config.latent_channels, 3, 16, 24
    return ReferenceDenoiser("diffusers WanTransformer3DModel", module, latent, predict, "diffusers")


def _recomputing(module: nn.Module) -> nn.Module:
    module.enable_gradient_checkpointing()
    return module.float().train()  # diffusers recomputes in training alone; these models have no dropout
