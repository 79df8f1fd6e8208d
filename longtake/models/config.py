"""`MMDiTConfig`, the `model` section of a run under Open-Sora 2.0's key names, and `LoraConfig`, its `lora`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator, model_validator

from longtake.config.section import OpenSection, Section
from longtake.hub import published_facts

Backend = Literal["auto", "sdpa", "flash", "cudnn", "efficient", "math", "fa3", "flex"]  # kernels of attention


class ModelSection(OpenSection):
    """Fields of every denoiser's `model` section: source of weights, attention, recomputation.

    A subclass adds a `type` of one literal, its sizes, and what its class needs of them.
    """

    DENOISER: ClassVar[str]  # "module:class" of the denoiser, imported when one is built
    WIDTHS: ClassVar[Mapping[str, str]] = MappingProxyType({})  # condition made of text -> key of its width

    type: str = Field(description="the denoiser")
    from_pretrained: str | None = Field(
        None,
        description="weights to start from: a .safetensors file or a .pth of plain tensors, a folder of them, a "
        "checkpoint of a run (glob too), or on the Hugging Face hub owner/name or owner/name/file.safetensors",
    )
    from_part: Literal["ema", "model"] = Field(
        "ema", description="of a checkpoint: the averaged weights, where it has them, or the weights as trained"
    )
    strict_load: bool = Field(True, description="False: weights missing or unknown in the file are noted, not refused")
    attention: Backend = Field(
        "auto",
        description="kernel of attention: `flash`, `cudnn`, `efficient`, `fa3` (FlashAttention-3), `flex`, or `math` "
        "(matmul and softmax); `sdpa` leaves it to PyTorch, so does `auto`, but for short sequences on a CPU (math)",
    )
    grad_ckpt_settings: tuple[NonNegativeInt, ...] | None = Field(
        None,
        description="first blocks of each list of the model whose activations are recomputed in backward; None: all, "
        "where `recompute` is given",
    )
    recompute: (
        Literal["none", "selective", "full", "auto"] | Annotated[float, Field(gt=0, lt=1)] | tuple[str, ...] | None
    ) = Field(
        None,
        description="what these blocks save: `none` everything; `selective` their input and the output of attention; "
        "`full` their input; names of linear layers, as `selective` and the outputs of these; a number the share "
        "that the compiler chooses (PyTorch's activation_memory_budget); `auto` for each entry of bucket_config the "
        "first of `none`, `selective`, `full` that fits by the plan, on a CPU `full`; None: `selective` with "
        "grad_ckpt_settings, else `none`",
    )
    grad_ckpt_buffer_size: int = Field(
        0,
        ge=0,
        le=1 << 50,
        description="bytes of each process's host memory to which recomputed blocks offload what they save; 0: none",
    )

    def without_recomputation(self) -> Self:
        """Return the same for a model of which no gradient is taken."""
        return self.model_copy(update={"recompute": "none"})

    @property
    @abstractmethod
    def head_dim(self) -> int:
        """K, the width of one attention head."""

    @property
    @abstractmethod
    def conditions(self) -> tuple[str, ...]:
        """The conditions that the model needs: the names in its class's `needs`."""

    @property
    def refuses_known(self) -> str | None:
        """Why nothing can be known of its samples, and what to write to change that; None where something can."""
        return None

    def refuses_length(self, num_latents: int) -> str | None:
        """Why it takes no videos of so many latent frames, and which it takes; None where it does."""
        if num_latents == 1 or num_latents % self.patch[0] == 0:
            return None
        return f"{num_latents} latent frames do not divide into patches of {self.patch[0]}; choose a multiple of it"

    @property
    @abstractmethod
    def latent_channels(self) -> int:
        """C, the channels of the latents that the model takes and returns."""

    @property
    @abstractmethod
    def patch(self) -> tuple[int, int, int]:
        """Latent frames, rows and columns of one token."""

    def to_dict(self) -> dict[str, Any]:
        """Return the keys as plain data, as PEFT asks for a model's config when it merges adapters."""
        return self.model_dump()

    def refuse_channels(self, channels: int) -> None:
        """Raise `ValueError` where the autoencoder's latents have other channels than the model."""
        if channels != self.latent_channels:
            raise ValueError(
                f"model: takes latents of {self.latent_channels} channels, and those of ae have {channels}; "
                "choose another ae, or a model made for it"
            )


class MMDiTConfig(ModelSection):
    """Shape and options of the MMDiT denoiser; the defaults are the 11B text-to-video model of Open-Sora 2.0.

    `in_channels` counts the features of one video token: latent channels x patch_size^2. `use_liger_rope` selects the
    rotary layout the weights were made for: True rotates positions (j, K/2 + j) of a head ("half"), False rotates
    (2j, 2j + 1) ("interleaved"). `fused_qkv` stores q, k, v (and the MLP input of single blocks) as one projection, as
    FLUX does. `init` says how parameters start: `torch` = uniform within +-1/sqrt(fan in), `cond_in` zero;
    `zero_gate` = in addition every modulation and the last layer zero, so that each block starts as the identity.
    """

    DENOISER: ClassVar[str] = "longtake.models.mmdit:MMDiT"
    WIDTHS: ClassVar[Mapping[str, str]] = MappingProxyType({"text": "context_in_dim", "vector": "vec_in_dim"})

    type: Literal["flux"] = Field("flux", description="the denoiser; `flux` is the MMDiT")
    grow_cond_in: bool = Field(
        False, description="weights without `cond_in` get one of zeros: image-to-video from a text-to-video model"
    )
    init: Literal["torch", "zero_gate"] = Field(
        "torch", description="how parameters start; `zero_gate`: blocks as identity"
    )

    in_channels: PositiveInt = Field(64, description="features of a video token: latent channels x patch_size^2")
    patch_size: PositiveInt = Field(2, description="side of a patch on the latent grid; frames are never merged")
    vec_in_dim: PositiveInt = Field(768, description="width of the pooled text vector")
    context_in_dim: PositiveInt = Field(4096, description="width of a text token")
    hidden_size: PositiveInt = Field(3072, description="width of the model")
    mlp_ratio: PositiveFloat = Field(4.0, description="width of the MLPs' hidden layer over hidden_size")
    num_heads: PositiveInt = Field(24, description="attention heads")
    depth: NonNegativeInt = Field(19, description="double-stream blocks")
    depth_single_blocks: NonNegativeInt = Field(38, description="single-stream blocks")
    axes_dim: tuple[PositiveInt, PositiveInt, PositiveInt] = Field(
        (16, 56, 56), description="channels of a head that encode t, y, x; their sum is hidden_size / num_heads"
    )
    theta: PositiveFloat = Field(10000, description="base of the rotary frequencies; small grids want a small one")
    qkv_bias: bool = Field(
        True, description="bias in the q, k, v projections of double blocks; single blocks always have it"
    )
    guidance_embed: bool = Field(False, description="embed a guidance scale (distilled models)")
    cond_embed: bool = Field(False, description="embed known frames (image-to-video models)")
    fused_qkv: bool = Field(False, description="one projection for q, k, v, as FLUX stores it")
    use_liger_rope: bool = Field(True, description="rotary layout: True half-split, False interleaved pairs")

    grad_ckpt_settings: tuple[NonNegativeInt, NonNegativeInt] | None = Field(
        None, description="(double, single) blocks whose activations are recomputed in backward"
    )

    @model_validator(mode="after")
    def _growth_has_an_entrance(self) -> MMDiTConfig:
        if self.grow_cond_in and not self.cond_embed:
            raise ValueError("grow_cond_in = True: cond_embed is False, so there is no cond_in; set cond_embed to True")
        return self

    @model_validator(mode="after")
    def _check_sizes(self) -> MMDiTConfig:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size = {self.hidden_size} does not divide into num_heads = {self.num_heads}; "
                "choose a hidden_size that is a multiple of num_heads"
            )
        if sum(self.axes_dim) != self.head_dim:
            raise ValueError(
                f"axes_dim = {list(self.axes_dim)} sums to {sum(self.axes_dim)}; it must sum to "
                f"hidden_size / num_heads = {self.head_dim}"
            )
        if any(dim % 2 for dim in self.axes_dim):
            raise ValueError(f"axes_dim = {list(self.axes_dim)}: each entry must be even, for it rotates pairs")
        if self.in_channels % self.patch_size**2:
            raise ValueError(
                f"in_channels = {self.in_channels} must be latent channels x patch_size^2, a multiple of "
                f"{self.patch_size**2} at patch_size = {self.patch_size}"
            )
        if self.grad_ckpt_buffer_size and self.grad_ckpt_settings is None and self.recompute in (None, "none"):
            raise ValueError(
                f"grad_ckpt_buffer_size = {self.grad_ckpt_buffer_size}: is for recomputed blocks, and there are none; "
                'write recompute = "selective" too'
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
        return self.in_channels // self.patch_size**2

    @property
    def conditions(self) -> tuple[str, ...]:
        """Text, its pooled vector, and what the options ask for."""
        optional = {"guidance": self.guidance_embed, "visual": self.cond_embed}
        return "text", "vector", *(name for name, wanted in optional.items() if wanted)

    @property
    def refuses_known(self) -> str | None:
        """Known frames come in as the condition `visual`."""
        if self.cond_embed:
            return None
        return "model.cond_embed is False, so the model takes no known frames; write model.cond_embed = True"

    @property
    def patch(self) -> tuple[int, int, int]:
        return 1, self.patch_size, self.patch_size

    def refuse_channels(self, channels: int) -> None:
        packed = channels * self.patch_size**2
        if self.in_channels != packed:
            raise ValueError(
                f"model.in_channels = {self.in_channels}: the autoencoder's {channels} latent channels in patches of "
                f"{self.patch_size}x{self.patch_size} make {packed}; write model.in_channels = {packed}"
            )

    @property
    def visual_channels(self) -> int:
        """Features of one token of the visual condition: (mask + latent) x patch_size^2."""
        return self.in_channels + self.patch_size**2


LOW_NOISE_KEY = "low_noise.from_pretrained"


class LowNoiseConfig(Section):
    """A second denoiser for the times below a boundary, of the kind and sizes of `model`, which has those above."""

    from_pretrained: str | None = Field(
        None,
        description="its weights, named as for model.from_pretrained; None: it starts at random",
    )
    boundary: float = Field(
        0.875, description="the share of the way to noise from which on, upwards, `model` is the denoiser"
    )
    share: float | None = Field(
        None,
        ge=0,
        le=1,
        description="share of training steps for the second denoiser, drawn step by step; None: that of the law of "
        "times below `boundary`",
    )
    lora: str | None = Field(
        None, description="file of adapters for the second denoiser, named as for lora.from_pretrained"
    )

    @field_validator("boundary")
    @classmethod
    def _both_have_times(cls, value: float) -> float:
        if not 0 < value < 1:
            raise ValueError(f"{value:g}: expected a number between 0 and 1, such as 0.875")
        return value


class LoraConfig(Section):
    """Trains low-rank adapters in place of the denoiser's weights, which stay in the compute dtype or in fewer bits."""

    rank: PositiveInt = Field(16, description="rank of the adapters")
    alpha: PositiveFloat = Field(16, description="adapters act with strength alpha / rank")
    rslora: bool = Field(False, description="they act with strength alpha / sqrt(rank) instead (rsLoRA)")
    targets: tuple[str, ...] | None = Field(
        None,
        description="layers that get adapters: names, or ends of names, of layers or of modules that hold layers, here "
        "or in the published model; `*` for anything; None: attention and MLPs of all blocks",
    )
    dora: bool = Field(False, description="train the lengths of the weights' rows beside the adapters (DoRA)")
    base: Literal["dense", "int8", "fp8", "nf4"] = Field(
        "dense", description="how the blocks' frozen linear weights are kept: `dense` is the compute dtype"
    )
    from_pretrained: str | None = Field(
        None,
        description="adapters to start from: a file or PEFT's folder, here or by a name on the Hugging Face hub; "
        "rank, alpha, rslora, targets and dora are then its",
    )
    strength: float = Field(1.0, description="adapters are multiplied by this; 0: the base model alone")
    more: tuple[tuple[str, float], ...] = Field(
        (), description="for generation: further files of adapters, added to those of `from_pretrained`, and how strong"
    )

    @model_validator(mode="after")
    def _more_than_one(self) -> LoraConfig:
        if self.more and self.from_pretrained is None:
            raise ValueError("more: there is no first file; name it with from_pretrained (--lora FILE)")
        return self

    @field_validator("targets")
    @classmethod
    def _some_layer_is_named(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if value is not None and not any(value):
            raise ValueError(
                "names no layer; name some, such as to_q, or leave it out for attention and MLPs of all blocks"
            )
        return value

    @property
    def scaling(self) -> float:
        """The strength that new adapters act with."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


def with_published(data: Any, read: Callable[[Mapping[str, Any], str], Mapping[str, Any]]) -> Any:
    """Keys of a section, and where it has a local folder of weights as `from_pretrained`, those that are not written.

    read: the content of the folder's `config.json` and that file's name -> keys of the section.
    """
    if not isinstance(data, Mapping) or not isinstance(folder := data.get("from_pretrained"), str):
        return data
    for file in ("transformer/config.json", "config.json"):
        if (facts := published_facts(folder, file)) is not None:
            return {**read(facts, f"{folder}/{file}"), **data}
    return data
