"""From a `model` section to its denoiser class, a denoiser, and conditions of the shapes that it needs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pkgutil import resolve_name
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from longtake.contracts import Conditions
from longtake.models.plans import SequencePlan, TensorSplit

LatentSize = tuple[int, int, int, int]  # (C, F, h, w)
_resolved = cache(resolve_name)


class Denoiser(Protocol):
    """Data that a denoiser class declares in addition to `forward(x, t, conditions)`; `config` is its own section."""

    blocks: ClassVar[Mapping[str, str]]  # list of repeated blocks -> the config key that counts them, in forward order
    in_turn: ClassVar[bool]  # the lists are as long as each other, and a block of each runs in turn; only where so
    varying_dims: ClassVar[Mapping[str, tuple[tuple[int, ...], ...]]]  # of a block's arguments, what buckets change
    tensor_plan: ClassVar[Mapping[str, TensorSplit] | None]
    tensor_norms: ClassVar[tuple[str, ...]]  # RMSNorms (patterns) over features that a column layer cuts; only where so
    sequence_plan: ClassVar[SequencePlan | None]  # None of either: degrees above 1 are refused

    @staticmethod
    def traced_frames(config: Any) -> tuple[int, ...]:
        """Six numbers of frames of tokens that it takes, ascending, for a plan to trace; only where it does not take
        any."""

    @staticmethod
    def needs(config: Any, latent: LatentSize, text_tokens: int) -> Mapping[str, tuple[int, ...]]:
        """Condition -> shape of one sample's, for latents (C, F, h, w) and captions of so many tokens."""

    @staticmethod
    def units(config: Any, latent: LatentSize, text_tokens: int) -> Mapping[str, int]:
        """Tokens of each unit that `sequence_plan.units` names, such as a frame; only for a plan with units.
        text_tokens: of one text of the condition `text`."""

    @staticmethod
    def tokens(config: Any, latent: LatentSize) -> int:
        """Video tokens of one sample."""

    @staticmethod
    def heads(config: Any) -> int:
        """Attention heads, which sequence and tensor peers share."""

    @staticmethod
    def mixed_width(config: Any) -> int:
        """Numbers a token that attention puts out, and what lets tokens see each other beside it; only for a model that
        has such a thing."""

    @staticmethod
    def forward_flops(config: Any, latent: LatentSize, text_tokens: int) -> int:
        """Floating-point operations of one forward of one sample."""


def denoiser_class(config: Any) -> type[Any]:
    """Return the class of a `model` section's denoiser, which the section names by `DENOISER` = "module:class"."""
    return _resolved(type(config).DENOISER)


def build_denoiser(config: Any) -> nn.Module:
    """Return the denoiser of a config on the current default device (`with torch.device("meta")` allocates nothing).

    Its parameters are not a run's values yet: fill them with `initial_values` or from a file.
    """
    return denoiser_class(config)(config)


def block_counts(config: Any) -> dict[str, int]:
    """Blocks in each of the denoiser's lists, by the list's name."""
    return {name: getattr(config, key) for name, key in denoiser_class(config).blocks.items()}


def example_conditions(
    config: Any,
    latent: LatentSize,
    text_tokens: int,
    batch: int = 1,
    device: torch.device | str = "cpu",
    given: Conditions | None = None,
) -> Conditions:
    """Conditions of the shapes that a denoiser needs, for measuring and tracing: zeros, or rows of those `given`.

    given: one row of conditions, such as what stands for no text; each is expanded to the batch.
    """

    def one(name: str, shape: tuple[int, ...]) -> Tensor:
        if given is not None and name in given:
            row = given[name]
            several = shape[: len(shape) + 1 - row.dim()]  # captions of a clip, all of which it stands for
            return row.view(len(row), *[1] * len(several), *row.shape[1:]).expand(batch, *several, *row.shape[1:])
        return torch.zeros(batch, *shape, device=device)

    needs = denoiser_class(config).needs(config, latent, text_tokens)
    masks = {} if given is None else {name: mask.expand(batch, *mask.shape[1:]) for name, mask in given.masks.items()}
    return Conditions({name: one(name, shape) for name, shape in needs.items()}, masks)
