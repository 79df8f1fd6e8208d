"""The part of a run's config that says what the model is; training and generation build on it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, SerializeAsAny, ValidationInfo, field_validator, model_validator

from longtake.config.section import Section
from longtake.contracts import UserError
from longtake.data.rules import SampleRules
from longtake.diffusion.config import ObjectiveSection
from longtake.encoders.config import EncodersConfig
from longtake.families.record import Family
from longtake.families.registry import default_model, family_of, family_of_tree, published_sections
from longtake.models.config import LoraConfig, LowNoiseConfig, ModelSection
from longtake.parallel.config import ParallelConfig

if TYPE_CHECKING:
    from longtake.diffusion.known import KnownLaw


class SamplingDefaults(Section):
    """Default sampling of a run's videos. A size that is not set is that of its buckets."""

    resolution: str | None = Field(
        None, description="a name as in bucket_config; None: the largest there that has clips of several frames"
    )
    aspect_ratio: str | None = Field(
        None, description="width to height; None: 16:9, or the one that bucket_config keeps (`256px_ar1:1`)"
    )
    num_frames: int | None = Field(
        None, ge=1, description="1 makes a still; None: the longest length of that resolution in bucket_config"
    )
    num_steps: int = Field(50, ge=1, description="solver steps")
    guidance: float = Field(7.5, ge=0, description="classifier-free guidance scale; 1: the prompt alone")
    guidance_low: float | None = Field(
        None, ge=0, description="the same below low_noise.boundary, where the second denoiser works; None: guidance"
    )
    guidance_img: float = Field(3.0, ge=0, description="guidance scale of known frames; where none are known, unused")
    guidance_rule: str | None = Field(
        None, description="how the scale changes over the steps, by a name of the model's family; None: not at all"
    )
    guidance_numbers: dict[str, float] = Field({}, description="numbers of that rule, by name")
    text_osci: bool = Field(False, description="after 10 steps, text guidance at every second step only")
    image_osci: bool = Field(False, description="the same for guidance by known frames")
    scale_temporal_osci: bool = Field(
        False, description="guidance by known single frames grows over the frames and fades over the steps"
    )
    method: Literal["i2v", "distill"] = Field(
        "i2v", description="`i2v`: guided by branches; `distill`: the scale is a condition of the model"
    )
    guidance_batch: Literal["auto"] | bool = Field(
        "auto", description="True: branches of guidance as one batch, False: in turn; `auto`: as the memory allows"
    )
    solver: str = Field(
        "euler",
        description="`euler`; `ab2`, second order at the same cost; `unipc`, `dpmpp_2m`: Wan's solvers, on its times; "
        "`unipc_diffusers`: on those of diffusers",
    )
    shift: bool = Field(True, description="time grid shifted as in training; False: even steps")
    flow_shift: float | None = Field(None, gt=0, description="a fixed shift of the time grid instead")
    seed: int | None = Field(None, ge=0, lt=1 << 63, description="seed of the first video; None: the run's seed")


class SamplingOption(SamplingDefaults):
    """Sampling of videos of a fixed size."""

    resolution: str = Field("256px", description="a name as in bucket_config")
    aspect_ratio: str = Field("16:9", description="width to height")
    num_frames: int = Field(129, ge=1, description="1 makes a still")


def own_objective(data: Mapping[str, Any]) -> ObjectiveSection:
    family = family_of(data["model"])
    return family.objectives[0](**family.objective)


def own_sampling(data: Mapping[str, Any]) -> SamplingDefaults:
    return SamplingDefaults(**family_of(data["model"]).sampling)


class SystemConfig(EncodersConfig):
    """Config of the model: its parts, the device and mesh it runs on, and its default sampling."""

    model: SerializeAsAny[ModelSection] = Field(default_factory=default_model)
    low_noise: LowNoiseConfig | None = Field(
        None, description="second denoiser, for times below a boundary; None: `model` has all times"
    )
    lora: LoraConfig | None = Field(None, description="train adapters in place of the denoiser's own weights")
    freeze: tuple[str, ...] = Field(
        (), description="parameters or modules of the denoiser that do not train, by name, `*` for anything"
    )
    train_only: tuple[str, ...] | None = Field(
        None, description="parameters or modules of the denoiser that train, by name; all else does not"
    )
    objective: SerializeAsAny[ObjectiveSection] = Field(default_factory=own_objective)
    parallel: ParallelConfig = ParallelConfig()
    dtype: Literal["bf16", "fp32"] = Field("bf16", description="compute dtype; float32 where the device has no bf16")
    precision: Literal["fp8"] | None = Field(
        None,
        description="`fp8`: products of the blocks' linear layers in float8, by torchao, in training; needs `compile` "
        "and compute capability 8.9; None: in `dtype`",
    )
    master_dtype: Literal["fp32", "bf16"] = Field(
        "fp32", description="dtype that trained weights are kept in; `bf16` rounds their updates stochastically"
    )
    compile: bool | Literal["auto"] = Field(
        False,
        description="compile the denoiser's blocks: faster steps, a first step of minutes; `auto`: on a GPU, where "
        "there is a compiler",
    )
    compile_dynamic: bool | None = Field(
        None,
        description="True: one graph for all shapes of micro-batches; False: a graph for each; None: False for up to "
        "16 shapes (batch x tokens) of bucket_config, True for more",
    )
    compile_limit: int = Field(
        16,
        ge=1,
        description="shapes with graphs of their own, for each kind of block; further ones run uncompiled, with a "
        "warning",
    )
    compile_cache: str | None = Field(
        None, description="folder of your own in which compiled code waits for the next launch; None: PyTorch's choice"
    )
    device: Literal["auto", "cuda", "cpu"] = Field("auto", description="`auto` takes CUDA where there is one")
    guidance: float = Field(4.0, description="guidance scale given to a model that takes one as a condition")
    cpu_threads: int | None = Field(
        None, ge=1, description="threads of each process that computes on a CPU; None: PyTorch's choice"
    )
    deterministic: bool = Field(False, description="only deterministic CUDA kernels, at some cost in speed")
    tf32: bool = Field(False, description="float32 products and convolutions on CUDA in TF32, at 10 bits of mantissa")
    seed: int = Field(1024, ge=0, lt=1 << 63, description="decides initial weights, data order and every random choice")
    compat: str | tuple[str, ...] | None = Field(
        None, description="quirks of the published program to reproduce, by name; the family's name: all of them"
    )
    sampling_option: SamplingDefaults = Field(default_factory=own_sampling)
    fps_save: float = Field(24.0, gt=0, description="frame rate of written videos, and of their caption suffix")
    motion_score: float | None = Field(None, description="motion score in the caption suffix of generated videos")
    caption_facts: dict[str, str] = Field(
        {}, description="what captions of generated videos say besides, by name, where those of the model's family do"
    )
    ae_spatial_compression: int | None = Field(
        None, ge=1, description="sides of a bucket are multiples of this; default: ae's latent cell x model.patch_size"
    )

    BENEATH: ClassVar[str] = "model.from_pretrained"

    @classmethod
    def beneath(cls, written: Mapping[str, Any]) -> dict[str, Any]:
        """Return the defaults that the folder of a whole published model, as `model.from_pretrained`, sets: keys that
        are not written, of sections that name no other kind and no weights of their own."""
        if (found := published_sections(written)) is None:
            return {}
        kind, sections = found
        below: dict[str, Any] = {"model": {**sections.get("model", {}), "type": kind}}
        for name, section in sections.items():
            if name == "model":
                continue
            own = written.get(name, {})
            is_another = not isinstance(own, Mapping) or own.get("from_pretrained") is not None
            if not is_another and own.get("type", section.get("type")) == section.get("type"):
                below[name] = section
        return below

    @model_validator(mode="before")
    @classmethod
    def _over_one_folder(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        below = cls.beneath(data)
        whole = {**data, **{name: {**section, **data.get(name, {})} for name, section in below.items()}}
        for name, keys in family_of_tree(whole).keys_of(whole.get("compat")).items():
            if isinstance(own := whole.get(name, {}), Mapping):
                whole[name] = {**keys, **own}
        return whole

    @field_validator("model", mode="before")
    @classmethod
    def _of_the_default_family(cls, value: Any) -> Any:
        return {"type": default_model().type, **value} if isinstance(value, Mapping) else value

    @field_validator("objective", "sampling_option", mode="before")
    @classmethod
    def _filled_by_the_family(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, Mapping) or "model" not in info.data:
            return value
        family = family_of(info.data["model"])
        if info.field_name == "sampling_option":
            return {**family.sampling, **value}
        usual = family.objectives[0].model_fields["type"].default
        own = family.objective if value.get("type", usual) == usual else {}
        return {**own, "type": usual, **value}

    @field_validator("motion_score", mode="before")
    @classmethod
    def _motion_is_a_number(cls, score: Any) -> Any:
        if isinstance(score, str) and score.strip().lower() == "dynamic":
            raise ValueError("asks a paid service for a number; give one yourself, from 1 (still) to 7 (lively)")
        return score

    @model_validator(mode="after")
    def _parts_fit(self) -> SystemConfig:
        if self.lora is not None and self.train_only is not None:  # `freeze`, as in presets, says no more than lora
            raise ValueError("train_only: with lora the adapters alone train; leave one of the two out")
        if self.lora is not None and self.precision == "fp8":
            raise ValueError(
                'precision = "fp8": adapters train over frozen weights, which float8 is not tested with; '
                "leave precision or lora out"
            )
        if refusal := self.family.refuses(self.model):
            raise ValueError(refusal)
        self.model.refuse_channels(self.ae.latent.channels)
        for text in self.family.texts:
            key, dim = self.model.WIDTHS[text.condition], getattr(self, text.section).dim
            if (width := getattr(self.model, key)) != dim:
                raise ValueError(f"{text.section}.dim = {dim}: model.{key} is {width}; the two must be equal")
        self.family.quirks_of(self.compat)
        kinds = self.family.objectives
        if not isinstance(self.objective, kinds):
            own = " or ".join(f'"{kind.model_fields["type"].default}"' for kind in kinds)
            raise ValueError(f'objective.type = "{self.objective.type}": the model is trained by {own}')
        if fault := unknown_name("caption_facts", self.caption_facts, self.family.rules(self).prompt_facts):
            raise ValueError(fault)
        if self.sampling_option.guidance_low is not None and self.low_noise is None:
            raise ValueError(
                f"sampling_option.guidance_low = {self.sampling_option.guidance_low:g}: is for a second denoiser, and "
                "there is no low_noise; leave it out, or write low_noise.from_pretrained"
            )
        solvers = self.objective.SOLVERS
        if (rule := self.sampling_option.guidance_rule) not in (None, *self.family.guidance):
            choices = "choose " + ", ".join(self.family.guidance) if self.family.guidance else "this model has none"
            raise ValueError(f"sampling_option.guidance_rule = {rule!r}: is not known; {choices}")
        if numbers := self.sampling_option.guidance_numbers:
            if rule is None:
                raise ValueError(f"sampling_option.guidance_numbers = {numbers}: there is no guidance_rule they are of")
            self.family.guidance_rule(rule, numbers)
        if (solver := self.sampling_option.solver) not in solvers:
            raise ValueError(f'sampling_option.solver = "{solver}": choose {" or ".join(solvers)}')
        return self

    def of_low_noise(self, trained: bool = False) -> Self:
        """Return the same with the second denoiser as its `model`, of a config that has one; its adapters are those of
        `low_noise.lora`, or, where a run trains it, such as the run's `lora` says."""
        assert self.low_noise is not None, "there is no second denoiser"
        lora, file = None, self.low_noise.lora
        if file is not None:
            lora = (self.lora or LoraConfig()).model_copy(update={"from_pretrained": file, "more": ()})
        elif trained and self.lora is not None:
            lora = self.lora.model_copy(update={"from_pretrained": None, "more": ()})
        model = self.model.model_copy(update={"from_pretrained": self.low_noise.from_pretrained})
        return self.model_copy(update={"model": model, "lora": lora, "low_noise": None})

    def check_shape(self, num_frames: int, height: int, width: int) -> None:
        """Raise `UserError` for pixels that the autoencoder cannot give back, or the model cannot take."""
        self.ae.check(num_frames, height, width)
        self.check_length(num_frames, self.ae.latent(num_frames, height, width)[1])

    def check_length(self, num_frames: int, num_latents: int) -> None:
        """Raise `UserError` for videos of so many latent frames that the model cannot take."""
        if refusal := self.model.refuses_length(num_latents):
            raise UserError(f"model: videos of {num_frames} frames are not taken: {refusal}")

    @property
    def family(self) -> Family:
        """Family of the model."""
        return family_of(self.model)

    @property
    def known_law(self) -> KnownLaw | None:
        """The law of what may be known; None where the family has none or the model takes none."""
        return None if self.model.refuses_known else self.law_of_family

    @property
    def law_of_family(self) -> KnownLaw | None:
        """The same, whether or not the model takes any."""
        return self.family.known_law(self.model, self.ae)

    @property
    def kinds(self) -> Mapping[str, str]:
        """The kinds of known places that the model's law has, and what each makes known."""
        return self.family.kinds_of(self.model)

    @property
    def quirks(self) -> frozenset[str]:
        """The quirks of the published program that are turned on."""
        return self.family.quirks_of(self.compat)

    def compiles_on(self, device: str) -> bool:
        """Return whether blocks are compiled on devices of a type, where there is a compiler. On a CPU that takes
        minutes, and only small models run there, so `auto` disables it."""
        return self.compile is True or (self.compile == "auto" and device != "cpu")

    @property
    def text_length(self) -> int:
        """Tokens of an embedded caption; 0 where no text encoder gives a sequence."""
        of_sequences = (text.section for text in self.family.texts if not text.pooled)
        return next((getattr(self, section).max_length for section in of_sequences), 0)

    @property
    def bucket_law(self) -> str | None:
        """The key of `buckets.LAWS` by which clips get their buckets."""
        return self.family.bucket_law(self.quirks)

    @property
    def sample_rules(self) -> SampleRules:
        family = self.family
        rules = family.rules(self)
        facts = {**rules.prompt_facts, **self.caption_facts}
        segments = family.segments and family.segments(self)
        return replace(rules, segments=segments, companions=family.companions(self.model), prompt_facts=facts)

    @property
    def size_divisor(self) -> int:
        """Height and width of every bucket are multiples of this many pixels."""
        return self.ae_spatial_compression or self.ae.latent.spatial * self.model.patch[1]


def unknown_name(place: str, given: Iterable[str], known: Iterable[str]) -> str | None:
    """Return the sentence for the first name in a dict of the config that is none of those known; None where
    all are."""
    known = list(known)
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            others = f"choose among {', '.join(known)}" if known else "this model has none"
            fix = f"did you mean {place}.{near[0]}?" if near else others
            return f"{place}.{name}: is no key; {fix}"
    return None
