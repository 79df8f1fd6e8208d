"""Golden STDiT3 cases: tensors made by the published program, and tiny models."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from longtake.contracts import Conditions
from longtake.models.stdit3 import STDiT3
from longtake.models.stdit3_config import STDiT3Config
from longtake.weights.model import ModelWeights
from longtake.weights.stdit3 import FORMAT

FOLDER = Path(__file__).parents[1] / "golden" / "opensora_v1_2"
TINY = {
    "in_channels": 3,
    "hidden_size": 32,
    "depth": 2,
    "num_heads": 4,
    "mlp_ratio": 2.0,
    "caption_channels": 12,
    "model_max_length": 5,
    "input_sq_size": 32,
}


@cache
def read_golden(name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(settings, tensors) of `name`.safetensors."""
    with safe_open(FOLDER / f"{name}.safetensors", framework="pt") as file:
        return json.loads(file.metadata()["info"]), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


def golden_model(kind: str, **changes: Any) -> STDiT3:
    """The model `base` or `small`."""
    config = STDiT3Config(**read_golden(f"stdit3_{kind}_cases")[0]["config"], **changes)
    model = STDiT3(config)
    model.load_state_dict(dict(ModelWeights(FOLDER / f"stdit3_{kind}_weights.safetensors", config, FORMAT)))
    return model


def inputs_of(tensors: dict[str, Tensor], case: str) -> tuple[Tensor, Tensor, Conditions]:
    """(x, t, conditions) of a case."""
    given = {name.removeprefix(f"{case}."): value for name, value in tensors.items() if name.startswith(f"{case}.")}
    x, t = given["x"], given["timestep"]
    made = {"x_mask": given["x_mask"]} if "x_mask" in given else {}
    times = len(x) // len(given["fps"])  # both halves of guidance share what is no text
    size = torch.stack([given["height"], given["width"]], dim=1).repeat(times, 1)
    masks = {"text": given["mask"].bool().repeat(times, 1)} if "mask" in given else {}
    text = given["y"][:, 0]
    return x, t, Conditions({"text": text, "fps": given["fps"].repeat(times), "size": size, **made}, masks)


def tiny_config(**changes: Any) -> STDiT3Config:
    return STDiT3Config(**{**TINY, **changes})


def random_inputs(
    config: STDiT3Config, size: tuple[int, int, int] = (3, 4, 6), batch: int = 2, known: bool = False
) -> tuple[Tensor, Tensor, Conditions]:
    """(x, t, conditions) with captions of different lengths; `known`: the first frame of the first sample is."""
    draw = torch.Generator().manual_seed(sum(size))
    x = torch.randn(batch, config.in_channels, *size, generator=draw)
    t = 1000 * torch.rand(batch, generator=draw)
    length = config.model_max_length
    text = torch.randn(batch, length, config.caption_channels, generator=draw)
    mask = torch.arange(length) < torch.arange(batch, 0, -1)[:, None]
    tensors = {"text": text, "fps": torch.full((batch,), 24.0), "size": torch.tensor([[64.0, 48.0]] * batch)}
    if known:
        tensors["x_mask"] = torch.arange(batch * size[0]).view(batch, -1) > 0
    return x, t, Conditions(tensors, {"text": mask})
