"""Golden data of TTT-Video, and models and layers with its weights. Its README says what they hold."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from longtake.contracts import Conditions
from longtake.models.layers import RotaryPositions
from longtake.models.segments import Segments
from longtake.models.ttt import TTT, ScanOrder
from longtake.models.ttt_video import TTTVideo
from longtake.models.ttt_video_config import TTTVideoConfig
from longtake.weights.model import ModelWeights
from longtake.weights.ttt_video import FORMAT

FOLDER = Path(__file__).parents[1] / "golden" / "ttt_video"
TINY = {
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "out_channels": 4,
    "text_embed_dim": 32,
    "time_embed_dim": 24,
    "segment_frames": 2,
    "mini_batch_size": 8,
    "ttt_base_lr": 16.0,
}
SIZES: dict[str, dict[str, Any]] = {
    "linear": {"mixer": "ttt_linear"},
    "mlp": {"mixer": "ttt_mlp", "num_attention_heads": 3, "time_embed_dim": 16},
}
SEGMENTS = {"one": 1, "three": 3}
GRID = (2, 3)  # rows and columns of tokens


@cache
def golden(name: str) -> dict[str, Tensor]:
    return {key: value.float() for key, value in load_file(FOLDER / f"{name}.safetensors").items()}


def rules(case: str) -> dict[str, str]:
    """How inner rates are handed out -> where the golden results lie."""
    if case == "one":
        return {"aligned": case}
    return {"aligned": f"{case}.aligned", "last_row": f"{case}.last_row", "per_query": f"{case}.shipped"}


def tiny_config(kind: str = "mlp", **changes: Any) -> TTTVideoConfig:
    """Of the golden transformers: a model of a few thousand parameters."""
    return TTTVideoConfig(**{**TINY, **SIZES[kind], **changes})


def golden_model(kind: str, **changes: Any) -> TTTVideo:
    config = tiny_config(kind, **changes)
    model = TTTVideo(config)
    weights = ModelWeights(FOLDER / f"dit_{kind}_weights.safetensors", config, FORMAT)
    model.load_state_dict({name: value.float() for name, value in weights.items()})
    return model


def golden_inputs(tensors: dict[str, Tensor], case: str) -> tuple[Tensor, Tensor, Conditions]:
    video, text, t = (tensors[f"{case}.{name}"] for name in ("video", "text", "timesteps"))
    return video.transpose(1, 2), t.float(), Conditions(text=text)


def golden_layer(weights: dict[str, Tensor], kind: str, **changes: Any) -> TTT:
    """The layer with weights by the reference's names, gates where they are among them."""
    layer = TTT(TTTVideoConfig(**{**TINY, "mixer": f"ttt_{kind}", **changes}))
    naming, parameters = FORMAT.namings["published"], dict(layer.named_parameters())
    with torch.no_grad():
        for theirs, value in weights.items():
            (own,) = naming.parts_of(f"layers.0.seq_modeling_block.{theirs}")
            parameter = parameters[own.removeprefix("transformer_blocks.0.ttt.")]
            parameter.copy_(value.view(parameter.shape))
    return layer


def published_gradients(module: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    """Gradients by the reference's names in a layer, behind `seq_modeling_block`."""
    naming = FORMAT.namings["published"]
    found = {}
    for name, parameter in module.named_parameters():
        theirs, _ = naming.place_of(f"transformer_blocks.0.{prefix}{name}")
        if parameter.grad is not None:
            found[theirs.removeprefix("layers.0.seq_modeling_block.")] = parameter.grad
    return found


def order_of(config: TTTVideoConfig, segments: Segments, count: int, grid: tuple[int, int] = GRID) -> ScanOrder:
    quarter = config.head_dim // 4
    positions = RotaryPositions((quarter, quarter * 3 // 2, quarter * 3 // 2), 10_000.0)
    rope = positions((count * segments.frames + 1, *grid), torch.device("cpu"))
    return ScanOrder.of(config, segments, count, rope)


def joined(x: Tensor, segments: Segments, count: int) -> Tensor:
    """[texts | video] as the reference has it -> segment order."""
    texts = count * segments.text
    return segments.join(x[:, :texts].unflatten(1, (count, -1)), x[:, texts:])


def parted(x: Tensor, segments: Segments) -> Tensor:
    """The inverse of `joined`."""
    text, video = segments.part(x)
    return torch.cat([text.flatten(1, 2), video], 1)


def random_inputs(
    config: TTTVideoConfig, size: tuple[int, int, int] = (7, 4, 6), batch: int = 2, text_tokens: int = 5
) -> tuple[Tensor, Tensor, Conditions]:
    """(x, t, conditions) for a model of `config`."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    latent = (config.out_channels, *size)
    needs = TTTVideo.needs(config, latent, text_tokens)
    conditions = Conditions(**{name: draw(batch, *shape) for name, shape in needs.items()})
    return draw(batch, *latent), torch.linspace(20, 900, batch).round(), conditions
