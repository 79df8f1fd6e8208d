"""FLUX as diffusers computes it: forward and backward of the same blocks on as many tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from longtake.models import MMDiTConfig


class Sizes(Protocol):
    """What of a case the peer must know."""

    batch: int
    tokens: int
    text_tokens: int


def flux_peer(
    config: MMDiTConfig,
    sizes: Sizes,
    device: torch.device,
    dtype: torch.dtype,
    remat: tuple[int, int] = (0, 0),
    compiled: bool = True,
) -> dict[str, Callable[[], None]]:
    """`eager` and, if asked for, `compiled`: each a call that runs forward and backward once and frees the gradients.

    Weights are in `dtype`. Blocks are computed again all or none, as diffusers does: all if any of ours are. Empty
    where diffusers is not installed.
    """
    try:
        from diffusers import FluxTransformer2DModel
        from diffusers.utils import logging
    except ImportError:
        return {}
    logging.set_verbosity_error()  # it would warn of the cast below
    contenders = {}
    for name in ("eager", "compiled") if compiled else ("eager",):
        with torch.device(device):
            model = FluxTransformer2DModel(
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
            ).to(dtype)
        if any(remat):
            model.enable_gradient_checkpointing()
        if name == "compiled":
            model.compile_repeated_blocks(dynamic=False)
        contenders[name] = _runner(model, config, sizes, device, dtype)
    return contenders


def _runner(
    model: torch.nn.Module, config: MMDiTConfig, sizes: Sizes, device: torch.device, dtype: torch.dtype
) -> Callable[[], None]:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    inputs = {
        "hidden_states": random(sizes.batch, sizes.tokens, config.in_channels),
        "encoder_hidden_states": random(sizes.batch, sizes.text_tokens, config.context_in_dim),
        "pooled_projections": random(sizes.batch, config.vec_in_dim),
        "timestep": torch.rand(sizes.batch, device=device).to(dtype),
        "img_ids": torch.zeros(sizes.tokens, 3, device=device),
        "txt_ids": torch.zeros(sizes.text_tokens, 3, device=device),
    }
    target = random(sizes.batch, sizes.tokens, config.in_channels)

    def run() -> None:
        prediction = model(**inputs, return_dict=False)[0]
        (prediction.float() - target.float()).square().mean().backward()
        model.zero_grad(set_to_none=True)

    return run
