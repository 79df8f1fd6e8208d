"""The model section: Open-Sora's keys, and a sentence for sizes that do not go together."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from longtake.models.config import MMDiTConfig


def test_defaults_are_open_sora_2() -> None:
    config = MMDiTConfig()
    assert (config.head_dim, config.mlp_size, config.latent_channels, config.visual_channels) == (128, 12288, 16, 68)
    assert not config.cond_embed
    assert config.strict_load


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_heads": 25}, "hidden_size = 3072 does not divide into num_heads = 25"),
        ({"axes_dim": (16, 56, 58)}, "sums to 130; it must sum to hidden_size / num_heads = 128"),
        ({"axes_dim": (15, 57, 56)}, "each entry must be even"),
        ({"in_channels": 66}, "a multiple of 4 at patch_size = 2"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused_with_the_reason(changes: dict, sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        MMDiTConfig(**changes)


def test_lists_are_taken_for_axes_and_unknown_keys_are_not() -> None:
    assert MMDiTConfig(axes_dim=[16, 56, 56], grad_ckpt_settings=[8, 100]).axes_dim == (16, 56, 56)
    with pytest.raises(ValidationError):
        MMDiTConfig(hidden=3072)
