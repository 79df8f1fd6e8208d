"""`TTTVideoConfig`, the `model` section of a TTT-Video run: CogVideoX's keys, and those of what sees all segments."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from longtake.models.cogvideox_config import section_of
from longtake.models.config import ModelSection, with_published

Mixer = Literal["none", "ttt_linear", "ttt_mlp", "large_chunk"]


class TTTVideoConfig(ModelSection):
    """Shape and options of the TTT-Video denoiser; the defaults are the 5B model with TTT-MLP.

    A video has n segments of `segment_frames` latent frames, and one frame before the first: 12 n + 1. Attention stays
    in a segment and the frame before it; `mixer` carries what it should know of the others. `large_chunk` is the
    network of `ttt_mlp`, updated once a chunk.
    """

    DENOISER: ClassVar[str] = "longtake.models.ttt_video:TTTVideo"
    WIDTHS: ClassVar[Mapping[str, str]] = MappingProxyType({"text": "text_embed_dim"})

    type: Literal["ttt_video"] = Field("ttt_video", description="`ttt_video` is that of TTT-Video")
    mixer: Mixer = Field(
        "ttt_mlp", description="what segments know of each other by: nothing, or a network trained as the video passes"
    )
    directions: Literal["sequential", "parallel"] = Field(
        "sequential",
        description="the pass from the end reads what the pass from the start made, as published; `parallel`: both "
        "read the same, share their projections and run at once",
    )
    mini_batch_size: PositiveInt = Field(64, description="tokens of an update; 16 for ttt_linear where nothing is said")
    chunk: Literal["frame", "segment"] | PositiveInt = Field(
        "segment", description="an update of large_chunk: the tokens of a frame, of a segment, or so many"
    )
    ttt_base_lr: PositiveFloat = Field(0.1, description="the largest learning rate of an update; 1 for ttt_linear")

    init: Literal["torch", "zero_gate"] = Field(
        "torch", description="how parameters start; `zero_gate`: blocks as identity, but for their mixers"
    )

    num_layers: NonNegativeInt = Field(42, description="blocks")
    num_attention_heads: PositiveInt = Field(48, description="attention heads")
    attention_head_dim: PositiveInt = Field(64, description="width of a head")
    out_channels: PositiveInt = Field(16, description="channels of the latents")
    text_embed_dim: PositiveInt = Field(4096, description="width of a text token")
    time_embed_dim: PositiveInt = Field(512, description="width of the embedded timestep")
    patch_size: PositiveInt = Field(2, description="side of a patch on the latent grid")
    segment_frames: PositiveInt = Field(12, description="latent frames of a segment, less the one that it shares")

    rates: Literal["aligned", "last_row", "per_query"] = Field(
        "aligned",
        description="whose learning rate a token of a video of several segments gets: its own, or the one that the "
        "published GPU kernels read; `per_query`: as its PyTorch operations have them, far slower",
    )
    rotations: Literal["float32", "bfloat16"] = Field(
        "float32", description="precision of the rotary tables of attention; the published program trains with bfloat16"
    )
    inner_eps: PositiveFloat = Field(
        1e-8, description="eps of the inner LayerNorm; the published GPU kernels have 1e-6"
    )

    grad_ckpt_settings: tuple[NonNegativeInt] | None = Field(
        None, description="blocks whose activations are recomputed in backward"
    )

    @model_validator(mode="before")
    @classmethod
    def _as_published(cls, data: Any) -> Any:
        """Sizes that are not written are those of a folder of CogVideoX-5B, where that is here."""
        return with_published(data, sizes_of)

    @model_validator(mode="before")
    @classmethod
    def _as_the_mixer_wants(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("mixer") == "ttt_linear":
            return {"mini_batch_size": 16, "ttt_base_lr": 1.0, **data}
        return data

    @model_validator(mode="after")
    def _check_sizes(self) -> TTTVideoConfig:
        if self.attention_head_dim % 16:
            raise ValueError(
                f"attention_head_dim = {self.attention_head_dim}: positions of frames, rows and columns share it in "
                "pairs; choose a multiple of 16"
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
    def conditions(self) -> tuple[str, ...]:
        return ("text",)

    @property
    def refuses_known(self) -> str | None:
        return "the model of TTT-Video takes no known frames; leave them out"

    @property
    def patch(self) -> tuple[int, int, int]:
        return 1, self.patch_size, self.patch_size

    def num_segments(self, num_latents: int) -> int:
        """Segments of a video of so many latent frames."""
        return (num_latents - 1) // self.segment_frames

    def refuses_length(self, num_latents: int) -> str | None:
        step = self.segment_frames
        if num_latents > step and num_latents % step == 1 % step:
            return None
        return (
            f"{num_latents} latent frames are not {step} a segment and one more; choose {step + 1}, {2 * step + 1}, ..."
        )


# What the `config.json` of CogVideoX-5B says that this model takes for granted.
_FIXED = MappingProxyType(
    {
        "use_rotary_positional_embeddings": True,
        "use_learned_positional_embeddings": False,
        "patch_size_t": None,
        "ofs_embed_dim": None,
        "visual": None,
    }
)


def sizes_of(published: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return the sizes that a CogVideoX-5B's `config.json` gives this model. Raises `ValueError` for another
    model's."""
    section = section_of(published, place)
    for key, value in _FIXED.items():
        if section.get(key, value) != value:
            raise ValueError(f"{place}: {key} = {section[key]!r}: TTT-Video starts from CogVideoX-5B; give its folder")
    return {key: value for key, value in section.items() if key in TTTVideoConfig.model_fields and key != "type"}
