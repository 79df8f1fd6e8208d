"""Golden Wan cases: tensors made by the authors' code and diffusers, and tiny models of each kind.

Each file of `golden/wan/transformer` holds a model (`weights.*`, diffusers' names), its inputs, results and gradients,
compressed; the config and the norms of all gradients are in its metadata.
"""

from __future__ import annotations

import json
import lzma
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor

from longtake.contracts import Conditions
from longtake.models.wan import Wan
from longtake.models.wan_config import WanConfig, section_of
from longtake.weights.model import ModelWeights
from longtake.weights.wan import FORMAT

FOLDER = Path(__file__).parents[1] / "golden" / "wan"
KINDS = ("t2v", "i2v_a14b", "i2v_clip", "flf2v", "ti2v")
TINY = {
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "ffn_dim": 40,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 24,
    "text_len": 6,
    "freq_dim": 32,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "t2v": {},
    "i2v": {"in_channels": 12},
    "i2v_clip": {"in_channels": 12, "image_dim": 20},
    "ti2v": {"known_frames": True},
}


class OpenTensors(dict[str, Tensor]):
    """Tensors that are open already, as a source of weights."""

    def __init__(self, tensors: dict[str, Tensor], path: str = "tensors") -> None:
        super().__init__(tensors)
        self.path, self.metadata = Path(path), {}

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self[name].shape)


@cache
def read_golden(kind: str) -> tuple[dict[str, Any], dict[str, float], dict[str, Tensor]]:
    """(config of diffusers, gradient norms, tensors) of a kind; floats as float32."""
    data = lzma.decompress((FOLDER / "transformer" / f"{kind}.safetensors.xz").read_bytes())
    facts = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    tensors = {name: value.float() for name, value in load(data).items()}
    return json.loads(facts["config"]), json.loads(facts["grad_norms"]), tensors


def golden_config(kind: str, **changes: Any) -> WanConfig:
    return WanConfig(**section_of(read_golden(kind)[0], kind) | changes)


def golden_weights(kind: str) -> OpenTensors:
    """By diffusers' names."""
    tensors = read_golden(kind)[2]
    return OpenTensors({n.removeprefix("weights."): v for n, v in tensors.items() if n.startswith("weights.")})


def golden_model(kind: str, **changes: Any) -> Wan:
    model = Wan(config := golden_config(kind, **changes))
    model.load_state_dict(dict(ModelWeights(golden_weights(kind), config, FORMAT)))
    return model


def inputs_of(config: WanConfig, tensors: dict[str, Tensor], case: str) -> tuple[Tensor, Tensor, Conditions]:
    """(x, t, conditions) of a case. Tokens of frame 0 at time 0 are a frame that is given."""
    start = f"{case}.in."
    given = {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}
    joined, t = given["hidden_states"], given["timestep"]
    texts = [given[name] for name in sorted(given) if name.startswith("text")]
    text = torch.stack([torch.nn.functional.pad(one, (0, 0, 0, 16 - len(one))) for one in texts])
    more: dict[str, Tensor] = {}
    if t.dim() == 2:
        of_frames = t.unflatten(1, (joined.shape[2], -1))
        assert torch.equal(of_frames, of_frames[..., :1].expand_as(of_frames))
        more["x_mask"] = of_frames[..., 0] > 0
        t = t.amax(1)
    if config.visual_channels:
        more["visual"] = joined[:, config.out_channels :]
    if config.image_dim is not None:
        more["image"] = given["encoder_hidden_states_image"].reshape(len(joined), -1, config.image_dim)
    return joined[:, : config.out_channels], t, Conditions(text=text, **more)


def tiny_config(variant: str = "t2v", **changes: Any) -> WanConfig:
    return WanConfig(**{**TINY, **VARIANTS[variant], **changes})


def random_inputs(
    config: WanConfig, size: tuple[int, int, int] = (3, 4, 6), text_tokens: int = 5, batch: int = 2, seed: int = 0
) -> tuple[Tensor, Tensor, Conditions]:
    """Of a model of known frames the first frame is given in the first sample."""
    generator = torch.Generator().manual_seed(seed + sum(size))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    more: dict[str, Tensor] = {}
    if config.visual_channels:
        more["visual"] = normal(batch, config.visual_channels, *size)
    if config.image_dim is not None:
        more["image"] = normal(batch, config.image_tokens, config.image_dim)
    if config.known_frames:
        more["x_mask"] = torch.ones(batch, size[0], dtype=torch.bool)
        more["x_mask"][0, 0] = False
    t = torch.rand(batch, generator=generator) * 1000
    text = normal(batch, text_tokens, config.text_dim)
    return normal(batch, config.out_channels, *size), t, Conditions(text=text, **more)
