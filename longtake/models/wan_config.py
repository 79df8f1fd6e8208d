"""`WanConfig`, the `model` section of a Wan run, under the key names of diffusers.

`section_of` and the `published_*` functions turn the `config.json` of a folder of weights into such a section and back:
diffusers' form and the authors'.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from longtake.hub import tensor_names
from longtake.models.config import ModelSection, with_published

PICTURE_TOKENS = 257  # of CLIP, per image
CLIP_WIDTH = 1280
MASK_CHANNELS = 4  # of the condition `visual`: one per pixel frame of a latent frame


class WanConfig(ModelSection):
    """Shape and options of the Wan denoiser; the defaults are the 1.3B text-to-video model of Wan 2.1.

    Channels of `in_channels` beyond `out_channels` are those of the condition `visual`: 4 of a mask and the latents of
    the given frames. `image_dim` is the width of CLIP tokens, which the image-to-video models of Wan 2.1 read in their
    cross-attention; those of Wan 2.2 have the channels and no CLIP tokens.
    """

    DENOISER: ClassVar[str] = "longtake.models.wan:Wan"
    WIDTHS: ClassVar[Mapping[str, str]] = MappingProxyType({"text": "text_dim"})

    type: Literal["wan"] = Field("wan", description="the denoiser; `wan` is that of Wan 2.1 and 2.2")
    num_layers: NonNegativeInt = Field(30, description="blocks")
    num_attention_heads: PositiveInt = Field(12, description="attention heads")
    attention_head_dim: PositiveInt = Field(128, description="width of a head")
    ffn_dim: PositiveInt = Field(8960, description="width of the MLPs' hidden layer")
    in_channels: PositiveInt = Field(16, description="input channels: of the latents, and of given frames")
    out_channels: PositiveInt = Field(16, description="channels of the latents")
    text_dim: PositiveInt = Field(4096, description="width of a text token")
    text_len: PositiveInt = Field(512, description="text rows, filled up with zeros, all of them attended to")
    freq_dim: PositiveInt = Field(256, description="sinusoids of the timestep")
    image_dim: PositiveInt | None = Field(None, description="width of CLIP tokens; None: the model reads none")
    pos_embed_seq_len: PositiveInt | None = Field(
        None, description="CLIP tokens of two images with a learned table of positions; None: those of one, no table"
    )
    known_frames: bool = Field(
        False, description="True: given latent frames are clean, at time 0 (TI2V of Wan 2.2); False: no frame is given"
    )

    grad_ckpt_settings: tuple[NonNegativeInt] | None = Field(
        None, description="blocks whose activations are recomputed in backward"
    )

    @model_validator(mode="before")
    @classmethod
    def _as_published(cls, data: Any) -> Any:
        """Keys that are not written are as the folder of weights states, where it is local."""

        def read(facts: Mapping[str, Any], place: str) -> dict[str, Any]:
            return section_of(facts, place, _CLIP_LAYER in tensor_names(data["from_pretrained"]))

        return with_published(data, read)

    @model_validator(mode="after")
    def _check_sizes(self) -> WanConfig:
        if self.attention_head_dim % 2 or self.attention_head_dim < 6:
            raise ValueError(
                f"attention_head_dim = {self.attention_head_dim}: positions of frames, rows and columns share it in "
                "pairs; choose an even number from 6"
            )
        if self.freq_dim % 2:
            raise ValueError(f"freq_dim = {self.freq_dim}: half are cosines, half sines; choose an even number")
        if self.in_channels not in (self.out_channels, visual := 2 * self.out_channels + MASK_CHANNELS):
            raise ValueError(
                f"in_channels = {self.in_channels}: expected out_channels = {self.out_channels}, or {visual} for a "
                f"model that sees given frames (their latents and {MASK_CHANNELS} channels of a mask)"
            )
        if self.known_frames and self.visual_channels:
            raise ValueError(
                f"known_frames = True: this model sees given frames in {self.visual_channels} channels of its input; "
                "set known_frames to False"
            )
        if self.pos_embed_seq_len is not None and self.image_dim is None:
            raise ValueError("pos_embed_seq_len: is for CLIP tokens, and image_dim is None; leave it out")
        return self

    @property
    def head_dim(self) -> int:
        return self.attention_head_dim

    @property
    def hidden_size(self) -> int:
        """Width of the model."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def axes_dim(self) -> tuple[int, int, int]:
        """Channels of a head that encode frame, row and column."""
        side = 2 * (self.head_dim // 6)
        return self.head_dim - 2 * side, side, side

    @property
    def latent_channels(self) -> int:
        return self.out_channels

    @property
    def visual_channels(self) -> int:
        """Channels of the condition `visual`: a mask of 4, then latents; 0 where the model has none."""
        return self.in_channels - self.out_channels

    @property
    def image_tokens(self) -> int:
        """CLIP tokens that the cross-attention reads."""
        if self.image_dim is None:
            return 0
        return PICTURE_TOKENS if self.pos_embed_seq_len is None else self.pos_embed_seq_len

    @property
    def conditions(self) -> tuple[str, ...]:
        """Text, and what the sizes ask for."""
        optional = {"visual": self.visual_channels > 0, "image": self.image_dim is not None}
        return "text", *(name for name, wanted in optional.items() if wanted)

    @property
    def refuses_known(self) -> str | None:
        if self.known_frames or self.visual_channels:
            return None
        return "this model takes text alone; choose one of TI2V (model.known_frames = True) or I2V weights"

    @property
    def patch(self) -> tuple[int, int, int]:
        return 1, 2, 2


PUBLISHED_CLASS = "WanTransformer3DModel"  # as the `config.json` of diffusers names it
OFFICIAL_CLASS = "WanModel"  # and that of the authors
TI2V = "ti2v"
# Official configs are the same for the image-to-video models of Wan 2.1, which have this layer, and of 2.2.
_CLIP_LAYER = "img_emb.proj.1.weight"
# What every published `config.json` has alike, and the model takes for granted.
_FIXED = MappingProxyType(
    {
        "patch_size": [1, 2, 2],
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "eps": 1e-6,
        "rope_max_seq_len": 1024,
    }
)
_FIXED_OFFICIAL = MappingProxyType(
    {"patch_size": [1, 2, 2], "window_size": [-1, -1], "qk_norm": True, "cross_attn_norm": True, "eps": 1e-6}
)
_KEYS = (
    "num_layers",
    "num_attention_heads",
    "attention_head_dim",
    "ffn_dim",
    "in_channels",
    "out_channels",
    "text_dim",
    "freq_dim",
    "image_dim",
    "pos_embed_seq_len",
)
_OFFICIAL_KEYS = MappingProxyType(  # of the authors -> ours
    {
        "num_layers": "num_layers",
        "num_heads": "num_attention_heads",
        "ffn_dim": "ffn_dim",
        "in_dim": "in_channels",
        "out_dim": "out_channels",
        "text_dim": "text_dim",
        "text_len": "text_len",
        "freq_dim": "freq_dim",
    }
)
_OFFICIAL_SIZES = MappingProxyType({"dim": 2048, "num_heads": 16})  # of the authors' class, where a file lacks them
_UNSUPPORTED = ("vace_layers", "vace_in_channels", "add_ref_conv", "add_control_adapter")  # of further forms of Wan


def section_of(published: Mapping[str, Any], place: str, reads_clip: bool = False) -> dict[str, Any]:
    """Return the `model` section of a folder's `config.json`, diffusers' or the authors', which does not name CLIP
    layers (`reads_clip`). Raises `ValueError` for a model of another kind."""
    kind = published.get("_class_name")
    if kind not in (PUBLISHED_CLASS, OFFICIAL_CLASS):
        raise ValueError(f"{place}: is the config of {kind}, not of a Wan; give a folder of Wan 2.1 or 2.2")
    is_official = kind == OFFICIAL_CLASS
    for key, value in (_FIXED_OFFICIAL if is_official else _FIXED).items():
        found = published.get(key, value)
        if (list(found) if isinstance(found, (list, tuple)) else found) != value:
            raise ValueError(f"{place}: {key} = {found!r}: is not supported; give a model that has {value!r}")
    for key in _UNSUPPORTED:
        if published.get(key):
            raise ValueError(f"{place}: {key} = {published[key]!r}: is not supported; give a T2V, I2V or TI2V model")
    if is_official:
        section = _of_official(published, place)
        if reads_clip:
            section["image_dim"] = CLIP_WIDTH
    else:
        section = _of_diffusers(published, place)
    # Only TI2V, of 48 latent channels, reads frames that are given at time 0; diffusers keeps that in the pipeline.
    is_ti2v = published.get("model_type") == TI2V if is_official else section.get("out_channels") == 48
    return {"type": "wan", **section, "known_frames": is_ti2v}


def _of_diffusers(published: Mapping[str, Any], place: str) -> dict[str, Any]:
    section = {key: published[key] for key in _KEYS if key in published}
    added = published.get("added_kv_proj_dim")
    width = section.get("num_attention_heads", 40) * section.get("attention_head_dim", 128)
    if (added is None) != (section.get("image_dim") is None) or added not in (None, width):
        raise ValueError(
            f"{place}: added_kv_proj_dim = {added!r} with image_dim = {section.get('image_dim')!r}: expected both "
            f"None, or {width} with the width of CLIP tokens"
        )
    return section


def _of_official(published: Mapping[str, Any], place: str) -> dict[str, Any]:
    sizes = {**_OFFICIAL_SIZES, **published}
    section = {ours: sizes[theirs] for theirs, ours in _OFFICIAL_KEYS.items() if theirs in sizes}
    width, heads = sizes["dim"], sizes["num_heads"]
    if width % heads:
        raise ValueError(f"{place}: dim = {width}: expected a multiple of num_heads = {heads}")
    section["attention_head_dim"] = width // heads
    if published.get("model_type") == "flf2v":
        section |= {"image_dim": CLIP_WIDTH, "pos_embed_seq_len": 2 * PICTURE_TOKENS}
    return section


def published_config(config: WanConfig) -> dict[str, Any]:
    """Return the `config.json` of such a model's folder, for diffusers."""
    return {
        "_class_name": PUBLISHED_CLASS,
        **_FIXED,
        **{key: getattr(config, key) for key in _KEYS},
        "added_kv_proj_dim": None if config.image_dim is None else config.hidden_size,
    }


def official_config(config: WanConfig) -> dict[str, Any]:
    """Return the same for the authors' program, and for those that read its folders."""
    kind = "i2v" if config.visual_channels else TI2V if config.known_frames else "t2v"
    return {
        "_class_name": OFFICIAL_CLASS,
        "model_type": kind if config.pos_embed_seq_len is None else "flf2v",
        "dim": config.hidden_size,
        "eps": _FIXED["eps"],
        **{theirs: getattr(config, ours) for theirs, ours in _OFFICIAL_KEYS.items() if ours != "text_dim"},
    }
