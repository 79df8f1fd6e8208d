"""Golden CogVideoX cases: tensors made by diffusers and CogVideoX-Fun, and tiny models of each kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from longtake.contracts import Conditions
from longtake.models.cogvideox import CogVideoX
from longtake.models.cogvideox_config import CogVideoXConfig, section_of
from longtake.weights.cogvideox import FORMAT
from longtake.weights.model import ModelWeights

FOLDER = Path(__file__).parents[1] / "golden" / "cogvideox"
KINDS = ("t2v_2b", "t2v_5b", "i2v_5b", "i2v_1p5", "fun_inp_2b", "fun_inp_5b", "fun_inp_1p5")


def golden_config(kind: str, **changes: Any) -> CogVideoXConfig:
    path = FOLDER / "transformer" / kind / "config.json"
    return CogVideoXConfig(**section_of(json.loads(path.read_text()), str(path)) | changes)


def golden_model(kind: str, **changes: Any) -> CogVideoX:
    model = CogVideoX(config := golden_config(kind, **changes))
    model.load_state_dict(dict(ModelWeights(FOLDER / "transformer" / kind, config, FORMAT)))
    return model


def golden_io(kind: str) -> dict[str, Tensor]:
    """Inputs and results, as float32 where they are no whole numbers."""
    tensors = load_file(FOLDER / "transformer" / kind / "io.safetensors")
    return {name: value.float() if value.is_floating_point() else value for name, value in tensors.items()}


def inputs_of(config: CogVideoXConfig, tensors: dict[str, Tensor], case: str) -> tuple[Tensor, Tensor, Conditions]:
    """(x, t, conditions), frames behind channels; all channels of an I2V model lie in one tensor."""
    given = {
        name.removeprefix(f"{case}.in."): value for name, value in tensors.items() if name.startswith(f"{case}.in.")
    }
    channels = config.out_channels
    joined = torch.cat([given["hidden_states"], *(given[n] for n in ("inpaint_latents",) if n in given)], dim=2)
    joined = joined.transpose(1, 2)
    visual = {} if config.visual is None else {config.visual_condition: joined[:, channels:]}
    return joined[:, :channels], given["timestep"].float(), Conditions(text=given["encoder_hidden_states"], **visual)


TINY = {
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "out_channels": 4,
    "text_embed_dim": 24,
    "max_text_seq_length": 5,
    "time_embed_dim": 32,
    "sample_height": 8,
    "sample_width": 12,
    "sample_frames": 9,
}
ROTARY = {"use_rotary_positional_embeddings": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "2b": {},
    "5b": ROTARY,
    "5b_i2v": {**ROTARY, "use_learned_positional_embeddings": True, "visual": "image"},
    "1.5": {**ROTARY, "patch_size_t": 2},
    "1.5_i2v": {**ROTARY, "patch_size_t": 2, "ofs_embed_dim": 32, "visual": "image"},
    "fun_inp_2b": {"positions": "fun", "visual": "inpaint"},
    "fun_inp_5b": {**ROTARY, "positions": "fun", "visual": "inpaint"},
    "fun_control": {**ROTARY, "positions": "fun", "visual": "control"},
}


def tiny_config(variant: str, **changes: Any) -> CogVideoXConfig:
    """A model of a few thousand parameters, of one of `VARIANTS`."""
    return CogVideoXConfig(**TINY | VARIANTS[variant] | changes)


def random_inputs(
    config: CogVideoXConfig, size: tuple[int, int, int] = (3, 8, 12), batch: int = 2, text_tokens: int = 5
) -> tuple[Tensor, Tensor, Conditions]:
    """(x, t, conditions) for a model of `config`."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    latent = (config.out_channels, *size)
    needs = CogVideoX.needs(config, latent, text_tokens)
    conditions = Conditions(**{name: draw(batch, *shape) for name, shape in needs.items()})
    return draw(batch, *latent), torch.linspace(20, 900, batch).round(), conditions
