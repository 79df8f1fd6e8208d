"""The models that `step.py` measures: their sizes, what a step of each is made of, and the peer of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers_peer import cogvideox_peer, flux_peer

from longtake.contracts import Conditions, Draw, LatentShape
from longtake.diffusion.objective import Objective, build_objective
from longtake.families.registry import family_of
from longtake.models.build import denoiser_class, example_conditions
from longtake.models.cogvideox_config import CogVideoXConfig
from longtake.models.config import MMDiTConfig, ModelSection
from longtake.random import Purpose

LATENT = LatentShape(16, 4, 8, causal=True)
Shape = tuple[int, int, int]  # T, H, W


@dataclass(frozen=True)
class Size:
    """A model at one size, and what it is measured on where nothing is asked for."""

    model: ModelSection
    text_tokens: int
    frames: Sequence[int]
    sides: tuple[int, int]  # height and width in pixels
    blocks: tuple[int, ...] | None = None  # that run, in each list; None: all
    batches: Mapping[int, int] = field(default_factory=dict)  # samples of a micro-batch by frames; others: 1
    also: Sequence[Shape] = ()  # further lines


@dataclass(frozen=True)
class Subject:
    """A kind of model that can be measured."""

    sizes: Mapping[str, Size]  # the last is the model itself
    peer: Callable[..., dict[str, Callable[[], None]]]


_COGVIDEOX = {"use_rotary_positional_embeddings": True, "time_embed_dim": 512}
SUBJECTS = {
    "flux": Subject(
        {
            "tiny": Size(
                MMDiTConfig(
                    hidden_size=96,
                    num_heads=4,
                    axes_dim=(8, 8, 8),
                    depth=1,
                    depth_single_blocks=2,
                    context_in_dim=64,
                    vec_in_dim=32,
                ),
                16,
                (1, 5),
                (64, 64),
            ),
            "small": Size(
                MMDiTConfig(
                    hidden_size=512,
                    num_heads=8,
                    axes_dim=(16, 24, 24),
                    depth=2,
                    depth_single_blocks=4,
                    context_in_dim=512,
                    vec_in_dim=256,
                ),
                64,
                (1, 9),
                (256, 256),
            ),
            "11b": Size(
                MMDiTConfig(),
                512,
                (1, 33, 65, 97, 129),
                (256, 256),
                (2, 4),
                {1: 45, 33: 12, 65: 6, 97: 4, 129: 3},
                [(33, 768, 768)],
            ),
        },
        flux_peer,
    ),
    "cogvideox-5b": Subject(
        {
            "tiny": Size(
                CogVideoXConfig(
                    num_layers=2, num_attention_heads=4, attention_head_dim=32, text_embed_dim=64, **_COGVIDEOX
                ),
                16,
                (1, 5),
                (64, 64),
            ),
            "small": Size(
                CogVideoXConfig(num_layers=4, num_attention_heads=8, text_embed_dim=512, **_COGVIDEOX),
                64,
                (1, 9),
                (256, 256),
            ),
            # 17,776 tokens with those of the text
            "5b": Size(
                CogVideoXConfig(num_layers=42, num_attention_heads=48, **_COGVIDEOX), 226, (49,), (480, 720), (4,)
            ),
        },
        cogvideox_peer,
    ),
}


def blocks_of(model: ModelSection) -> tuple[int, ...]:
    """How many blocks each list of a model has."""
    return tuple(getattr(model, key) for key in denoiser_class(model).blocks.values())


def with_blocks(model: ModelSection, blocks: Sequence[int]) -> ModelSection:
    """The same model with so many blocks in each list."""
    keys = denoiser_class(model).blocks.values()
    return model.model_copy(update=dict(zip(keys, blocks, strict=True)))


def objective_of(model: ModelSection) -> Objective:
    """What models of the kind are trained by."""
    return build_objective(family_of(model).objectives[0](), model.patch[1], frozenset())


def draws_of(model: ModelSection) -> dict[str, Draw]:
    """The random numbers of a sample: the objective's, and of the dropout of each text."""
    texts = len(family_of(model).texts)
    return {**objective_of(model).draws, "dropout": Draw(Purpose.DROPOUT, "uniform", (texts,))}


def random_conditions(
    model: ModelSection, latent: tuple[int, int, int, int], text_tokens: int, batch: int, **place: Any
) -> Conditions:
    """Conditions of the shapes that a model needs; `place`: device and dtype."""
    needed = example_conditions(model, latent, text_tokens, batch)
    return needed.map(lambda tensor: torch.randn(tensor.shape, **place))
