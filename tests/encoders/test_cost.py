"""What a plan takes encoding to cost, and what is counted over whole encodings by the real modules at full width."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from longtake.encoders.autoencoder_config import Autoencoder2DConfig, CogVideoXVAEConfig, HunyuanVAEConfig, PixelConfig
from longtake.encoders.cogvideox import CogVideoXAutoencoder, cogvideox_module
from longtake.encoders.config import ClipEncoderConfig, T5EncoderConfig, UMT5EncoderConfig, WordsConfig
from longtake.encoders.cost import autoencoder_cost, largest_piece, look, look_at_text, peak_of_piece, seen, text_cost
from longtake.encoders.kl import HunyuanAutoencoder, ImageAutoencoder, hunyuan_module, image_module
from longtake.encoders.opensora_v1_2_config import OpenSoraVAEConfig
from longtake.encoders.text import CLIP_L, T5_XXL, ClipEncoder, T5Encoder, clip_module, t5_module
from longtake.encoders.wan import WanAutoencoder, wan_module
from longtake.encoders.wan_config import WanVAEConfig
from tests.encoders.counted import counted_bytes, counted_flops

HUNYUAN, FLUX, COGVIDEOX = HunyuanVAEConfig(), Autoencoder2DConfig(), CogVideoXVAEConfig()
WAN, WAN_22 = WanVAEConfig(), WanVAEConfig(version="2.2")
WHOLE = HUNYUAN.model_copy(update={"use_spatial_tiling": False})
IN_TIME = HUNYUAN.model_copy(update={"use_temporal_tiling": True, "sample_tsize": 16})
PIECES = HUNYUAN.model_copy(update={"piece_elements": 2**24})
NARROW = HUNYUAN.model_copy(update={"block_out_channels": (32, 64, 64, 128), "layers_per_block": 1})


def autoencoder(config: Any) -> Callable[[], nn.Module]:
    if isinstance(config, WanVAEConfig):
        return lambda: WanAutoencoder(config, wan_module(config), torch.bfloat16)
    if isinstance(config, CogVideoXVAEConfig):
        return lambda: CogVideoXAutoencoder(config, cogvideox_module(config), torch.bfloat16)
    if isinstance(config, HunyuanVAEConfig):
        return lambda: HunyuanAutoencoder(config, hunyuan_module(config), torch.bfloat16)
    return lambda: ImageAutoencoder(config, image_module(config), torch.bfloat16)


@pytest.mark.parametrize(
    ("config", "shape", "batch"),
    [
        (HUNYUAN, (17, 192, 336), 1),
        (HUNYUAN, (1, 256, 256), 7),
        pytest.param(HUNYUAN, (1, 480, 272), 3, marks=pytest.mark.slow),
        (WHOLE, (5, 256, 320), 1),
        (IN_TIME, (33, 64, 96), 2),
        (PIECES, (9, 128, 128), 2),
        (NARROW, (9, 64, 64), 2),
        (FLUX, (1, 256, 256), 3),
        pytest.param(FLUX, (2, 192, 320), 1, marks=pytest.mark.slow),
        (COGVIDEOX, (13, 64, 96), 2),
        (WAN, (13, 64, 96), 2),
        (WAN_22, (9, 128, 96), 1),
    ],
    ids=[
        "tiles",
        "stills",
        "stills in tiles",
        "whole",
        "tiles in time",
        "pieces",
        "narrow",
        "FLUX",
        "FLUX of a clip",
        "chunks",
        "Wan 2.1",
        "Wan 2.2",
    ],
)
def test_an_autoencoder_costs_what_whole_encodings_do(config: Any, shape: tuple[int, int, int], batch: int) -> None:
    """Of which a plan traces one piece, and takes the law of pieces for the others."""

    def run(model: Any) -> torch.Tensor:
        return model._raw_posterior(torch.empty(batch, 3, *shape, dtype=torch.bfloat16))

    said = autoencoder_cost(config, shape, batch)
    assert said.flops == counted_flops(autoencoder(config), run)
    assert said.input_bytes == 9 * batch * 3 * math.prod(shape)
    assert said.rank_bytes() - said.input_bytes == pytest.approx(counted_bytes(autoencoder(config), run), rel=0.1)


def test_compiled_layers_cost_what_they_do_as_they_are() -> None:
    shape, compiled = (9, 64, 64), NARROW.model_copy(update={"compile": True})
    assert autoencoder_cost(compiled, shape, 1).flops == autoencoder_cost(NARROW, shape, 1).flops


@pytest.mark.parametrize(("frames", "batch"), [(145, 1), (145, 2), (1009, 1)])
def test_a_stream_costs_one_segment_and_what_it_carries_over(frames: int, batch: int) -> None:
    segments = COGVIDEOX.model_copy(update={"encode_frames": 48, "layers_per_block": 2})  # not published

    def run(model: Any) -> None:
        chunks = (torch.empty(batch, 3, length, 32, 48) for length in model.stream_lengths(min(frames, 145)))
        list(model.posterior_of_stream(chunks))

    said = autoencoder_cost(segments, (frames, 32, 48), batch)
    assert said.input_bytes == 9 * batch * 3 * 49 * 32 * 48
    assert said.rank_bytes() - said.input_bytes == pytest.approx(counted_bytes(autoencoder(segments), run), rel=0.1)


@pytest.mark.parametrize(("tokens", "batch"), [(512, 2), (64, 8)])
def test_t5_costs_what_its_stack_does(tokens: int, batch: int) -> None:
    facts = {**T5_XXL, "num_layers": 2}
    check_text(T5EncoderConfig(max_length=tokens), lambda: t5_module(facts), batch)


def test_clip_costs_what_its_text_half_does() -> None:
    check_text(ClipEncoderConfig(), lambda: clip_module(CLIP_L), 8)


def text_encoder(config: T5EncoderConfig | ClipEncoderConfig, build: Callable[[], nn.Module]) -> Any:
    kind = T5Encoder if isinstance(config, T5EncoderConfig) else ClipEncoder
    with torch.device("meta"):
        module = build().to(torch.bfloat16).eval()
    return kind(config, module, None, torch.device("meta"))


def check_text(config: T5EncoderConfig | ClipEncoderConfig, build: Callable[[], nn.Module], batch: int) -> None:
    def run(model: nn.Module) -> object:
        return model(input_ids=torch.zeros(batch, config.max_length, dtype=torch.long)).last_hidden_state

    said = text_cost(look_at_text(text_encoder(config, build)), batch)
    assert said.flops == counted_flops(build, run)
    assert said.rank_bytes() == pytest.approx(counted_bytes(build, run), rel=0.1)


def test_folding_pixels_and_looking_up_words_cost_nothing() -> None:
    folding = autoencoder_cost(PixelConfig(), (16, 256, 256), 4)
    for said in (folding, text_cost(seen(WordsConfig()), 4)):
        assert (said.flops, said.rank_bytes() - said.input_bytes, said.rank_flops(4)) == (0, 0, 0)


def test_ranks_share_pieces_and_no_piece_is_cut() -> None:
    tiles = autoencoder_cost(HUNYUAN, (17, 768, 1344), 1)
    assert len(tiles.piece_flops) == 4 * 7  # 18 of them whole, which four ranks cannot share evenly
    assert tiles.flops / 4 < tiles.rank_flops(4) < 1.05 * tiles.flops / 4
    assert tiles.rank_flops(1) == tiles.flops
    one = autoencoder_cost(HUNYUAN, (17, 192, 256), 1)
    assert one.rank_flops(4) == one.flops
    assert tiles.rank_bytes(4) == tiles.rank_bytes()


@pytest.mark.parametrize("config", [T5EncoderConfig(), ClipEncoderConfig()], ids=["t5", "clip"])
def test_ranks_share_captions_and_each_has_the_embeddings_of_all(config: Any) -> None:
    one, three, nine, many = (text_cost(seen(config), batch) for batch in (1, 3, 9, 64))
    assert nine.flops == 9 * one.flops
    assert [nine.rank_flops(ranks) for ranks in (1, 2, 3, 4, 9, 16)] == [n * one.flops for n in (9, 5, 3, 3, 1, 1)]
    assert nine.rank_bytes(3) == three.rank_bytes() < nine.rank_bytes()
    embeddings = 64 * config.dim * (config.max_length if isinstance(config, T5EncoderConfig) else 1)
    assert many.rank_bytes(64) == max(one.rank_bytes(), (2 + 4) * embeddings)


@pytest.mark.parametrize(
    "config",
    [
        *(HUNYUAN, FLUX, CogVideoXVAEConfig(), T5EncoderConfig(), T5EncoderConfig(max_length=226), ClipEncoderConfig()),
        *(WAN, WAN_22, UMT5EncoderConfig()),
        pytest.param(OpenSoraVAEConfig(), marks=pytest.mark.slow),
    ],
    ids=["hunyuan", "flux", "cogvideox", "t5", "t5 of 226", "clip", "Wan 2.1", "Wan 2.2", "umt5", "opensora 1.2"],
)
def test_what_was_seen_of_a_published_encoder_is_what_a_trace_says(config: Any) -> None:
    """See `tools/encoder_costs.py`."""
    known = dict(seen(config))
    pieces, per_cell = known.pop("pieces", {}), known.pop("per_cell", {})
    now = look(config)
    assert known.keys() == now.keys()
    for name, numbers in now.items():
        assert known[name] == (pytest.approx(numbers, rel=1e-6, abs=0.1) if isinstance(numbers, list) else numbers)
    in_chunks = isinstance(config, OpenSoraVAEConfig)
    for shape in [(51, 240, 426)] if in_chunks else [(129, 256, 256), (97, 208, 256)] if pieces else []:
        assert pieces["x".join(map(str, largest_piece(config, shape)))] == peak_of_piece(config, shape)
    for shape in [(49, 480, 720), (49, 256, 256), (45, 384, 672), (1, 512, 512)] if per_cell else []:
        frames, cells = largest_piece(config, shape)
        assert per_cell[str(frames)] * cells == peak_of_piece(config, shape)
