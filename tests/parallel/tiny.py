"""A tiny denoiser of every family with micro-batches of uneven sizes, and the values it makes a step from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from longtake.contracts import Conditions
from longtake.models.cogvideox_config import CogVideoXConfig
from longtake.models.config import MMDiTConfig
from longtake.models.initial import linear_uniform
from longtake.models.stdit3_config import STDiT3Config
from longtake.models.ttt_video_config import TTTVideoConfig
from longtake.models.wan_config import WanConfig
from longtake.system.lora import fill, start_adapters
from longtake.weights import cogvideox, mmdit, stdit3, ttt_video, wan
from longtake.weights.format import Format
from tests.models import golden, golden_cogvideox, golden_stdit3, golden_ttt_video, golden_wan

Inputs = tuple[Tensor, Tensor, Conditions]


@dataclass(frozen=True)
class Tiny:
    """The denoisers of one family."""

    config: Callable[..., Any]  # by its fields that are not the common ones
    inputs: Callable[[Any, int], Inputs]  # of a micro-batch of two samples, by its number
    format: Format


def tiny(**changes: Any) -> MMDiTConfig:
    """An MMDiT whose heads divide among four peers, with two blocks of each kind."""
    sizes = {"vec_in_dim": 8, "context_in_dim": 12, "num_heads": 4, "axes_dim": (2, 2, 4), "depth": 2}
    return golden.tiny_config(**{**sizes, "cond_embed": True, **changes})


def _of_mmdit(config: MMDiTConfig, index: int) -> Inputs:
    """Of 18, 12, 5, 1 and 12 video tokens."""
    sizes = (((2, 6, 6), 5), ((3, 4, 4), 2), ((1, 10, 2), 1), ((1, 2, 2), 4), ((2, 4, 6), 7))
    size, text_tokens = sizes[index]
    return golden.random_inputs(config, size, text_tokens=text_tokens)


def _of_cogvideox(config: CogVideoXConfig, index: int) -> Inputs:
    """Of 72 video tokens, 4 or 2, 2 or 1, and 12 or 6."""
    return golden_cogvideox.random_inputs(config, ((3, 8, 12), (1, 3, 4), (2, 2, 2), (2, 4, 6))[index])


def _of_stdit3(config: STDiT3Config, index: int) -> Inputs:
    """Frames that do not divide, a still, fewer places than peers, neither divides by two; of the first and the last a
    frame is known."""
    sizes = ((3, 4, 6), (1, 3, 5), (5, 2, 2), (5, 6, 6))
    return golden_stdit3.random_inputs(config, sizes[index], known=index in (0, 3))


def _of_ttt_video(config: TTTVideoConfig, index: int) -> Inputs:
    """Of 3 segments, 1, 5 and 2: two peers have shares of 2 and 1, 1 and 0, 3 and 2, 1 and 1."""
    sizes = ((7, 4, 6), (3, 4, 6), (11, 3, 4), (5, 2, 4))
    return golden_ttt_video.random_inputs(config, sizes[index], text_tokens=4)


def _ttt_video(**changes: Any) -> TTTVideoConfig:
    return golden_ttt_video.tiny_config("linear", **{"num_attention_heads": 4, **changes})


def _of_wan(config: WanConfig, index: int) -> Inputs:
    """Of 18 video tokens, 4, 1 and 12; of TI2V the first frame of the first sample is given."""
    return golden_wan.random_inputs(config, ((3, 4, 6), (1, 3, 4), (1, 2, 2), (2, 4, 6))[index])


def _wan(variant: str = "t2v", **changes: Any) -> WanConfig:
    return golden_wan.tiny_config(variant, **{"num_attention_heads": 4, "attention_head_dim": 8, **changes})


FAMILIES: Mapping[type, Tiny] = {
    MMDiTConfig: Tiny(tiny, _of_mmdit, mmdit.FORMAT),
    CogVideoXConfig: Tiny(golden_cogvideox.tiny_config, _of_cogvideox, cogvideox.FORMAT),
    STDiT3Config: Tiny(golden_stdit3.tiny_config, _of_stdit3, stdit3.FORMAT),
    TTTVideoConfig: Tiny(_ttt_video, _of_ttt_video, ttt_video.FORMAT),
    WanConfig: Tiny(_wan, _of_wan, wan.FORMAT),
}


def micro_loss(model: nn.Module, index: int) -> Tensor:
    """The loss of the micro-batch of this number, whose two samples are each other's targets."""
    x, t, conditions = FAMILIES[type(model.config)].inputs(model.config, index)
    return (model(x, t, conditions) - x.flip(0)).square().mean()


@torch.no_grad()
def stir(model: nn.Module) -> None:
    """Gives values as in the midst of training to what starts at zero and would hide the gradients behind it: `B` of
    adapters, STDiT3's temporal blocks, and the last layer of Wan."""
    start_adapters(model, {})
    at_zero = ("lora_b", "magnitude", "head.head.weight")
    values = {name: p for name, p in model.named_parameters() if name.endswith(at_zero)}
    fill(model, {name: linear_uniform(name, p.shape, p.shape[-1], 7) + (p.ndim == 1) for name, p in values.items()})
    for name, p in model.named_parameters():
        if p.requires_grad and name.startswith("temporal_blocks."):
            p.add_(0.05)
