"""What encoding costs, by formula and counted over the real modules at full width."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from longtake.encoders import (
    CLIP_L,
    T5_XXL,
    Autoencoder2DConfig,
    HunyuanAutoencoder,
    HunyuanVAEConfig,
    ImageAutoencoder,
    PixelConfig,
    autoencoder_cost,
    clip_module,
    hunyuan_module,
    image_module,
    t5_module,
    text_cost,
)
from tests.encoders.counted import counted_bytes, counted_flops

HUNYUAN, FLUX = HunyuanVAEConfig(), Autoencoder2DConfig()
WHOLE = HUNYUAN.model_copy(update={"use_spatial_tiling": False})
IN_TIME = HUNYUAN.model_copy(update={"use_temporal_tiling": True, "sample_tsize": 16})
PIECES = HUNYUAN.model_copy(update={"piece_elements": 2**24})
NARROW = HUNYUAN.model_copy(update={"block_out_channels": (32, 64, 64, 128), "layers_per_block": 1})


def autoencoder(config: HunyuanVAEConfig | Autoencoder2DConfig) -> Callable[[], nn.Module]:
    if isinstance(config, HunyuanVAEConfig):
        return lambda: HunyuanAutoencoder(config, hunyuan_module(config), torch.bfloat16)
    return lambda: ImageAutoencoder(config, image_module(config), torch.bfloat16)


@pytest.mark.parametrize(
    ("config", "shape", "batch"),
    [
        (HUNYUAN, (17, 192, 336), 1),
        (HUNYUAN, (1, 256, 256), 7),
        (HUNYUAN, (1, 480, 272), 3),
        (WHOLE, (5, 256, 320), 1),
        (IN_TIME, (33, 64, 96), 2),
        (PIECES, (9, 128, 128), 2),
        (NARROW, (9, 64, 64), 2),
        (FLUX, (1, 256, 256), 3),
        (FLUX, (2, 192, 320), 1),
    ],
    ids=["tiles", "stills", "stills in tiles", "whole", "tiles in time", "pieces", "narrow", "FLUX", "FLUX of a clip"],
)
def test_an_autoencoder_costs_what_the_formula_says(config: Any, shape: tuple[int, int, int], batch: int) -> None:
    def run(model: Any) -> torch.Tensor:
        return model._raw_moments(torch.empty(batch, 3, *shape, dtype=torch.bfloat16))

    said = autoencoder_cost(config, shape, batch)
    assert said.flops == counted_flops(autoencoder(config), run)
    assert said.num_bytes == pytest.approx(counted_bytes(autoencoder(config), run), rel=0.1)


@pytest.mark.parametrize(("tokens", "batch"), [(512, 2), (64, 8)])
def test_t5_costs_what_the_formula_says(tokens: int, batch: int) -> None:
    facts = {**T5_XXL, "num_layers": 2}
    check_text(lambda: t5_module(facts), facts, "t5", tokens, batch)


def test_clip_costs_what_the_formula_says() -> None:
    check_text(lambda: clip_module(CLIP_L), CLIP_L, "clip", 77, 8)


def check_text(build: Callable[[], nn.Module], facts: dict[str, Any], section: str, tokens: int, batch: int) -> None:
    def run(model: nn.Module) -> object:
        return model(input_ids=torch.zeros(batch, tokens, dtype=torch.long)).last_hidden_state

    said = text_cost(facts, section, tokens, batch)
    assert said.flops == counted_flops(build, run)
    assert said.num_bytes == pytest.approx(counted_bytes(build, run), rel=0.1)


def test_folding_pixels_costs_nothing() -> None:
    said = autoencoder_cost(PixelConfig(), (16, 256, 256), 4)
    assert (said.flops, said.num_bytes, said.rank_flops(4)) == (0, 0, 0)


def test_ranks_share_pieces_and_no_piece_is_cut() -> None:
    tiles = autoencoder_cost(HUNYUAN, (17, 768, 1344), 1)
    assert len(tiles.piece_flops) == 4 * 7  # 18 of them whole, which four ranks cannot share evenly
    assert tiles.flops / 4 < tiles.rank_flops(4) < 1.05 * tiles.flops / 4
    assert tiles.rank_flops(1) == tiles.flops
    one = autoencoder_cost(HUNYUAN, (17, 192, 256), 1)
    assert one.rank_flops(4) == one.flops
    assert tiles.rank_bytes(4) == tiles.num_bytes


@pytest.mark.parametrize(("section", "facts", "tokens"), [("t5", T5_XXL, 512), ("clip", CLIP_L, 77)])
def test_ranks_share_captions_and_each_has_the_embeddings_of_all(section: str, facts: Any, tokens: int) -> None:
    one, three, nine = (text_cost(facts, section, tokens, batch) for batch in (1, 3, 9))
    assert nine.flops == 9 * one.flops
    assert [nine.rank_flops(ranks) for ranks in (1, 2, 3, 4, 9, 16)] == [n * one.flops for n in (9, 5, 3, 3, 1, 1)]
    assert (nine.rank_bytes(1), nine.rank_bytes(3)) == (nine.num_bytes, three.num_bytes)
    many = text_cost(facts, section, tokens, 64)
    embeddings = 64 * (tokens * facts["d_model"] if section == "t5" else facts["hidden_size"])
    assert many.rank_bytes(64) == max(one.num_bytes, (2 + 4) * embeddings)
