"""`STDiT3Config`, the `model` section of an Open-Sora 1.2 run, under the key names of its published `config.json`.

`section_of` and `published_config` turn that file into such a section and back.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from longtake.hub import published_facts
from longtake.models.config import ModelSection


class STDiT3Config(ModelSection):
    """Shape and options of the STDiT3 denoiser; the defaults are STDiT3-XL/2. STDiT3-3B/2 has hidden_size 1872 and
    num_heads 26."""

    DENOISER: ClassVar[str] = "longtake.models.stdit3:STDiT3"
    WIDTHS: ClassVar[Mapping[str, str]] = MappingProxyType({"text": "caption_channels"})

    type: Literal["stdit3"] = Field("stdit3", description="`stdit3` is that of Open-Sora 1.2")

    in_channels: PositiveInt = Field(4, description="channels of the latents")
    hidden_size: PositiveInt = Field(1152, description="width of the model")
    depth: NonNegativeInt = Field(28, description="spatial blocks, each followed by a temporal one")
    num_heads: PositiveInt = Field(16, description="attention heads")
    mlp_ratio: PositiveFloat = Field(4.0, description="MLP width / hidden_size")
    patch_size: tuple[PositiveInt, PositiveInt, PositiveInt] = Field(
        (1, 2, 2), description="latent frames, rows and columns of a token; frames are never merged"
    )
    caption_channels: PositiveInt = Field(4096, description="width of a text token")
    model_max_length: PositiveInt = Field(300, description="text tokens of what stands for no text")
    input_sq_size: PositiveInt = Field(512, description="side, in pixels, of the square whose positions are not scaled")
    pred_sigma: bool = Field(True, description="twice as many channels come out, as published; half of them are unused")
    qk_norm: bool = Field(True, description="queries and keys are normed before they are rotated")

    grad_ckpt_settings: tuple[NonNegativeInt, NonNegativeInt] | None = Field(
        None, description="(spatial, temporal) blocks whose activations are recomputed in backward"
    )

    @model_validator(mode="before")
    @classmethod
    def _as_published(cls, data: Any) -> Any:
        """Keys that are not written are as the folder of weights says, where it is here."""
        if not isinstance(data, Mapping) or not isinstance(folder := data.get("from_pretrained"), str):
            return data
        facts = published_facts(folder)
        return data if facts is None else {**section_of(facts, f"{folder}/config.json"), **data}

    @model_validator(mode="after")
    def _check_sizes(self) -> STDiT3Config:
        frames, rows, columns = self.patch_size
        if frames != 1 or rows != columns:
            raise ValueError(
                f"patch_size = {list(self.patch_size)}: patches are squares of one frame; write (1, {rows}, {rows})"
            )
        if self.hidden_size % self.num_heads or self.head_dim % 2:
            raise ValueError(
                f"hidden_size = {self.hidden_size}: does not give num_heads = {self.num_heads} heads of an even width; "
                f"choose a multiple of {2 * self.num_heads}"
            )
        if self.hidden_size % 4:
            raise ValueError(
                f"hidden_size = {self.hidden_size}: positions are sines and cosines of rows and columns; choose a "
                "multiple of 4"
            )
        return self

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def mlp_size(self) -> int:
        """Width of the hidden layer of every MLP."""
        return int(self.hidden_size * self.mlp_ratio)

    @property
    def latent_channels(self) -> int:
        return self.in_channels

    @property
    def out_channels(self) -> int:
        """Channels that the last layer gives, of which the first `in_channels` are the prediction."""
        return 2 * self.in_channels if self.pred_sigma else self.in_channels

    @property
    def patch(self) -> tuple[int, int, int]:
        return self.patch_size

    @property
    def conditions(self) -> tuple[str, ...]:
        """Text, frames a second, and the height and width of the bucket in pixels."""
        return "text", "fps", "size"


PUBLISHED_TYPE = "STDiT3"  # as a folder's `config.json` names it
_KEYS = ("in_channels", "hidden_size", "depth", "num_heads", "mlp_ratio", "patch_size", "caption_channels")
_KEYS += ("model_max_length", "input_sq_size", "pred_sigma", "qk_norm")
# What else a published `config.json` says: what a model is built of, which must be so, ...
_FIXED = MappingProxyType({"drop_path": 0.0, "skip_y_embedder": False})
# ... and matters of training and speed, which are set elsewhere here.
_OF_TRAINING = MappingProxyType(
    {
        "class_dropout_prob": 0.1,
        "enable_flash_attn": False,
        "enable_layernorm_kernel": False,
        "enable_sequence_parallelism": False,
        "freeze_y_embedder": False,
        "only_train_temporal": False,
        "input_size": (None, None, None),
    }
)


def section_of(published: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return the `model` section of a folder's `config.json`. Raises `ValueError` for a model of another kind."""
    if (kind := published.get("model_type")) != PUBLISHED_TYPE:
        raise ValueError(f"{place}: is the config of {kind}, not of an STDiT3; give a folder of Open-Sora 1.2")
    for key, value in _FIXED.items():
        if published.get(key, value) != value:
            raise ValueError(f"{place}: {key} = {published[key]!r}: is not supported; give a model that has {value!r}")
    section = {key: published[key] for key in _KEYS if key in published}
    return {**section, "type": STDiT3Config.model_fields["type"].default}


def published_config(config: STDiT3Config) -> dict[str, Any]:
    """Return the `config.json` of such a model's folder."""
    return {
        "architectures": [PUBLISHED_TYPE],
        "model_type": PUBLISHED_TYPE,
        **{key: getattr(config, key) for key in _KEYS},
        **_FIXED,
        **_OF_TRAINING,
    }
