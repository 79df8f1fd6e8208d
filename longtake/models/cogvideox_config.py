"""`CogVideoXConfig`, the `model` section of a CogVideoX run, under the key names of diffusers.

`section_of` and `published_config` turn the `config.json` of a folder of weights into such a section and back.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from longtake.models.config import ModelSection, with_published


class CogVideoXConfig(ModelSection):
    """Shape and options of the CogVideoX denoiser; the defaults are the 2B text-to-video model.

    `visual` says what comes in beside the noised latents, on channels behind theirs: `image`, latents of the given
    frames (I2V); `inpaint`, a mask and latents of the masked video (Fun-InP); `control`, latents of a control video
    (Fun-Control). `patch_size_t` is set for CogVideoX 1.5, whose rotary positions are those of the grid itself; those
    of 1.0 are brought to the grid of `sample_height` and `sample_width`.
    """

    DENOISER: ClassVar[str] = "longtake.models.cogvideox:CogVideoX"
    WIDTHS: ClassVar[Mapping[str, str]] = MappingProxyType({"text": "text_embed_dim"})

    type: Literal["cogvideox"] = Field("cogvideox", description="`cogvideox` is that of CogVideoX and CogVideoX-Fun")
    visual: Literal["image", "inpaint", "control"] | None = Field(
        None, description="what the model sees beside noise: given frames, a masked video, a control video"
    )
    init: Literal["torch", "zero_gate"] = Field(
        "torch", description="how parameters start; `zero_gate`: blocks as identity"
    )

    num_layers: NonNegativeInt = Field(30, description="blocks")
    num_attention_heads: PositiveInt = Field(30, description="attention heads")
    attention_head_dim: PositiveInt = Field(64, description="width of a head")
    out_channels: PositiveInt = Field(16, description="channels of the latents")
    text_embed_dim: PositiveInt = Field(4096, description="width of a text token")
    max_text_seq_length: PositiveInt = Field(226, description="text tokens that learned positions are for")
    time_embed_dim: PositiveInt = Field(512, description="width of the embedded timestep")
    ofs_embed_dim: PositiveInt | None = Field(
        None, description="width of the embedded offset 2.0 of CogVideoX 1.5 I2V, as time_embed_dim; None: no offset"
    )
    patch_size: PositiveInt = Field(2, description="side of a patch on the latent grid")
    patch_size_t: PositiveInt | None = Field(None, description="latent frames of a patch; None: one, as in 1.0")

    use_rotary_positional_embeddings: bool = Field(
        False, description="rotary positions (5B, 1.5), not sines added (2B)"
    )
    use_learned_positional_embeddings: bool = Field(
        False, description="a learned table is added beside rotary positions (5B-I2V)"
    )
    positions: Literal["diffusers", "fun"] = Field(
        "diffusers", description="whose positions at sizes other than the model's own: diffusers or CogVideoX-Fun"
    )
    add_noise_in_inpaint_model: bool = Field(
        False, description="given pixels of an inpaint model get a little noise, as CogVideoX-Fun V1.1 5B was trained"
    )
    sample_height: PositiveInt = Field(60, description="rows of the latents that positions were made for")
    sample_width: PositiveInt = Field(90, description="columns of them")
    sample_frames: PositiveInt = Field(49, description="frames, of pixels, that learned positions were made for")
    temporal_compression_ratio: PositiveInt = Field(4, description="frames of a latent frame")
    spatial_interpolation_scale: PositiveFloat = Field(1.875, description="rows and columns are divided by it (2B)")
    temporal_interpolation_scale: PositiveFloat = Field(1.0, description="frames are divided by it (2B)")

    grad_ckpt_settings: tuple[NonNegativeInt] | None = Field(
        None, description="blocks whose activations are recomputed in backward"
    )

    @model_validator(mode="before")
    @classmethod
    def _as_published(cls, data: Any) -> Any:
        """Keys that are not written are as the folder of weights says, where it is here."""
        return with_published(data, section_of)

    @model_validator(mode="after")
    def _check_sizes(self) -> CogVideoXConfig:
        if self.attention_head_dim % 16:
            raise ValueError(
                f"attention_head_dim = {self.attention_head_dim}: positions of frames, rows and columns share it in "
                "pairs; choose a multiple of 16"
            )
        if self.use_learned_positional_embeddings and not self.use_rotary_positional_embeddings:
            raise ValueError(
                "use_learned_positional_embeddings = True: is for models with rotary positions; set "
                "use_rotary_positional_embeddings to True"
            )
        if self.ofs_embed_dim not in (None, self.time_embed_dim):
            raise ValueError(
                f"ofs_embed_dim = {self.ofs_embed_dim}: is added to the embedded timestep; write "
                f"ofs_embed_dim = {self.time_embed_dim}"
            )
        return self

    @property
    def head_dim(self) -> int:
        return self.attention_head_dim

    @property
    def hidden_size(self) -> int:
        """Width of the model."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def latent_channels(self) -> int:
        return self.out_channels

    @property
    def visual_channels(self) -> int:
        """Channels behind those of the noised latents."""
        return {None: 0, "inpaint": 1 + self.out_channels}.get(self.visual, self.out_channels)

    @property
    def in_channels(self) -> int:
        """Channels of what the model sees, as diffusers counts them."""
        return self.out_channels + self.visual_channels

    @property
    def visual_condition(self) -> str | None:
        """The condition on those channels: a control video has a name of its own."""
        return "control" if self.visual == "control" else "visual" if self.visual else None

    @property
    def conditions(self) -> tuple[str, ...]:
        return ("text",) if self.visual_condition is None else ("text", self.visual_condition)

    @property
    def refuses_known(self) -> str | None:
        if self.visual in ("image", "inpaint"):
            return None
        return f'model.visual is {self.visual!r}, so the model takes no known frames; write model.visual = "inpaint"'

    @property
    def patch(self) -> tuple[int, int, int]:
        return self.patch_size_t or 1, self.patch_size, self.patch_size

    @property
    def base_grid(self) -> tuple[int, int, int]:
        """Frames, rows and columns of tokens that positions were made for."""
        frames = (self.sample_frames - 1) // self.temporal_compression_ratio + 1
        sizes = zip((frames, self.sample_height, self.sample_width), self.patch, strict=True)
        frames, rows, columns = (size // patch for size, patch in sizes)
        return frames, rows, columns


PUBLISHED_CLASS = "CogVideoXTransformer3DModel"  # as a folder's `config.json` names it
# What every published `config.json` says alike, and the model takes for granted.
_FIXED = MappingProxyType(
    {
        "activation_fn": "gelu-approximate",
        "attention_bias": True,
        "dropout": 0.0,
        "flip_sin_to_cos": True,
        "freq_shift": 0,
        "norm_elementwise_affine": True,
        "norm_eps": 1e-5,
        "timestep_activation_fn": "silu",
    }
)
_OF_FUN = "add_noise_in_inpaint_model"  # a key that the folders of CogVideoX-Fun alone have
_KINDS_OF_FUN = ("inpaint", "control")  # values of `visual` that no weights of diffusers' own have
_OWN_KEYS = ("type", "visual", "positions", "init", _OF_FUN)


def _published_keys() -> list[str]:
    return sorted(CogVideoXConfig.model_fields.keys() - ModelSection.model_fields.keys() - set(_OWN_KEYS))


def section_of(published: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return the `model` section of a folder's `config.json`; what channels beyond the latents' own are for follows
    from their number and the model's embeddings. Raises `ValueError` for a model of another kind."""
    if (kind := published.get("_class_name")) != PUBLISHED_CLASS:
        raise ValueError(
            f"{place}: is the config of {kind}, not of a CogVideoX; give a folder of CogVideoX or CogVideoX-Fun"
        )
    for key, value in _FIXED.items():
        if published.get(key, value) != value:
            raise ValueError(f"{place}: {key} = {published[key]!r}: is not supported; give a model that has {value!r}")
    section = {key: published[key] for key in _published_keys() if key in published}
    latent = section.get("out_channels", 16)
    more = published.get("in_channels", latent) - latent
    of_stills = section.get("use_learned_positional_embeddings") or section.get("ofs_embed_dim")
    kinds = {0: None, 1 + latent: "inpaint", latent: "image" if of_stills else "control"}
    if more not in kinds:
        raise ValueError(
            f"{place}: in_channels = {published['in_channels']}: the model sees {latent}, {2 * latent} or "
            f"{2 * latent + 1} channels beside out_channels = {latent}; give another folder"
        )
    of_fun = _OF_FUN in published or kinds[more] in _KINDS_OF_FUN  # V1.0 lacks the key
    return {
        **section,
        "type": CogVideoXConfig.model_fields["type"].default,
        "visual": kinds[more],
        "positions": published.get("positions", "fun" if of_fun else "diffusers"),
        _OF_FUN: bool(published.get(_OF_FUN)),
    }


def published_config(config: CogVideoXConfig) -> dict[str, Any]:
    """Return the `config.json` of such a model's folder, for diffusers, or for CogVideoX-Fun where its
    positions are."""
    of_fun = {_OF_FUN: config.add_noise_in_inpaint_model} if config.positions == "fun" else {}
    positions = {"positions": "diffusers"} if config.visual in _KINDS_OF_FUN and not of_fun else {}
    return {
        "_class_name": PUBLISHED_CLASS,
        **_FIXED,
        **{key: getattr(config, key) for key in _published_keys()},
        "in_channels": config.in_channels,
        "patch_bias": config.patch_size_t is None,
        **of_fun,
        **positions,
    }
