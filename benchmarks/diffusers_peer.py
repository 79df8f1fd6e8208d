"""Peers of `step.py`: forward and backward of the same blocks on as many tokens, as diffusers computes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from longtake.models.cogvideox_config import CogVideoXConfig
from longtake.models.config import MMDiTConfig

Draw = Callable[..., Tensor]  # sizes -> a normal tensor
Inputs = tuple[Mapping[str, Any], Tensor]  # what the model is called with, and what its prediction is held against


class Sizes(Protocol):
    """What of a case a peer must know."""

    batch: int
    tokens: int
    latent_shape: tuple[int, int, int, int]
    text_tokens: int


def flux_peer(config: MMDiTConfig, sizes: Sizes, *case: Any, **options: Any) -> dict[str, Callable[[], None]]:
    """FLUX: `contenders` for `FluxTransformer2DModel`."""

    def make() -> nn.Module:
        from diffusers import FluxTransformer2DModel

        return FluxTransformer2DModel(
            patch_size=1,
            in_channels=config.in_channels,
            num_layers=config.depth,
            num_single_layers=config.depth_single_blocks,
            attention_head_dim=config.head_dim,
            num_attention_heads=config.num_heads,
            joint_attention_dim=config.context_in_dim,
            pooled_projection_dim=config.vec_in_dim,
            guidance_embeds=False,
            axes_dims_rope=config.axes_dim,
        )

    def inputs(random: Draw, device: torch.device, dtype: torch.dtype) -> Inputs:
        found = {
            "hidden_states": random(sizes.batch, sizes.tokens, config.in_channels),
            "encoder_hidden_states": random(sizes.batch, sizes.text_tokens, config.context_in_dim),
            "pooled_projections": random(sizes.batch, config.vec_in_dim),
            "timestep": torch.rand(sizes.batch, device=device).to(dtype),
            "img_ids": torch.zeros(sizes.tokens, 3, device=device),
            "txt_ids": torch.zeros(sizes.text_tokens, 3, device=device),
        }
        return found, random(sizes.batch, sizes.tokens, config.in_channels)

    return contenders(make, inputs, *case, **options)


def cogvideox_peer(config: CogVideoXConfig, sizes: Sizes, *case: Any, **options: Any) -> dict[str, Callable[[], None]]:
    """CogVideoX: `contenders` for `CogVideoXTransformer3DModel`."""

    def make() -> nn.Module:
        from diffusers import CogVideoXTransformer3DModel

        return CogVideoXTransformer3DModel(
            num_attention_heads=config.num_attention_heads,
            attention_head_dim=config.attention_head_dim,
            in_channels=config.in_channels,
            out_channels=config.out_channels,
            time_embed_dim=config.time_embed_dim,
            text_embed_dim=config.text_embed_dim,
            num_layers=config.num_layers,
            max_text_seq_length=sizes.text_tokens,
            use_rotary_positional_embeddings=True,
        )

    def inputs(random: Draw, device: torch.device, dtype: torch.dtype) -> Inputs:
        from diffusers.models.embeddings import get_3d_rotary_pos_embed

        channels, frames, height, width = sizes.latent_shape
        cells = height // config.patch_size, width // config.patch_size
        found = {
            "hidden_states": random(sizes.batch, frames, channels, height, width),
            "encoder_hidden_states": random(sizes.batch, sizes.text_tokens, config.text_embed_dim),
            "timestep": torch.randint(0, 1000, (sizes.batch,), device=device),
            "image_rotary_emb": get_3d_rotary_pos_embed(
                config.attention_head_dim, ((0, 0), cells), cells, frames, device=device
            ),
        }
        return found, random(sizes.batch, frames, channels, height, width)

    return contenders(make, inputs, *case, **options)


def contenders(
    make: Callable[[], nn.Module],
    inputs: Callable[[Draw, torch.device, torch.dtype], Inputs],
    device: torch.device,
    dtype: torch.dtype,
    remat: tuple[int, ...] = (0,),
    compiled: bool = True,
) -> dict[str, Callable[[], None]]:
    """`eager` and, if asked for, `compiled`: each a call that runs forward and backward once and frees the gradients.

    Weights are in `dtype`. Blocks are computed again all or none, as diffusers does: all if any of ours are. Empty
    where diffusers is not installed.
    """
    try:
        from diffusers.utils import logging
    except ImportError:
        return {}
    logging.set_verbosity_error()  # it would warn of the cast below

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    found = {}
    for name in ("eager", "compiled") if compiled else ("eager",):
        with torch.device(device):
            model = make().to(dtype)
        if any(remat):
            model.enable_gradient_checkpointing()
        if name == "compiled":
            _compile_blocks(model)
        found[name] = _runner(model, *inputs(random, device, dtype))
    return found


def _compile_blocks(model: nn.Module) -> None:
    """Each repeated block by itself, as diffusers' `compile_repeated_blocks`, which not all of its models have."""
    for blocks in ("transformer_blocks", "single_transformer_blocks"):
        for block in getattr(model, blocks, ()):
            block.compile(dynamic=False)


def _runner(model: nn.Module, inputs: Mapping[str, Any], target: Tensor) -> Callable[[], None]:
    def run() -> None:
        prediction = model(**inputs, return_dict=False)[0]
        (prediction.float() - target.float()).square().mean().backward()
        model.zero_grad(set_to_none=True)

    return run
