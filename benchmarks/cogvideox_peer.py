"""CogVideoX as diffusers computes it: forward and backward of the same blocks on as many tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from longtake.models.cogvideox_config import CogVideoXConfig


class Sizes(Protocol):
    """What of a case the peer must know."""

    batch: int
    latent_shape: tuple[int, int, int, int]
    text_tokens: int


def cogvideox_peer(
    config: CogVideoXConfig,
    sizes: Sizes,
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
        from diffusers import CogVideoXTransformer3DModel
        from diffusers.utils import logging
    except ImportError:
        return {}
    logging.set_verbosity_error()  # it would warn of the cast below
    contenders = {}
    for name in ("eager", "compiled") if compiled else ("eager",):
        with torch.device(device):
            model = CogVideoXTransformer3DModel(
                num_attention_heads=config.num_attention_heads,
                attention_head_dim=config.attention_head_dim,
                in_channels=config.in_channels,
                out_channels=config.out_channels,
                time_embed_dim=config.time_embed_dim,
                text_embed_dim=config.text_embed_dim,
                num_layers=config.num_layers,
                max_text_seq_length=sizes.text_tokens,
                use_rotary_positional_embeddings=True,
            ).to(dtype)
        if any(remat):
            model.enable_gradient_checkpointing()
        if name == "compiled":
            for block in model.transformer_blocks:
                block.compile(dynamic=False)
        contenders[name] = _runner(model, config, sizes, device, dtype)
    return contenders


def _runner(
    model: torch.nn.Module, config: CogVideoXConfig, sizes: Sizes, device: torch.device, dtype: torch.dtype
) -> Callable[[], None]:
    from diffusers.models.embeddings import get_3d_rotary_pos_embed

    channels, frames, height, width = sizes.latent_shape
    rows, columns = height // config.patch_size, width // config.patch_size
    rotations = get_3d_rotary_pos_embed(
        config.attention_head_dim, ((0, 0), (rows, columns)), (rows, columns), frames, device=device
    )

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    inputs = {
        "hidden_states": random(sizes.batch, frames, channels, height, width),
        "encoder_hidden_states": random(sizes.batch, sizes.text_tokens, config.text_embed_dim),
        "timestep": torch.randint(0, 1000, (sizes.batch,), device=device),
        "image_rotary_emb": rotations,
    }
    target = random(sizes.batch, frames, channels, height, width)

    def run() -> None:
        prediction = model(**inputs, return_dict=False)[0]
        (prediction.float() - target.float()).square().mean().backward()
        model.zero_grad(set_to_none=True)

    return run
