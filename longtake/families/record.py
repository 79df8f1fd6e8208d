"""The record of a model family: everything that system, training, generation and plan need to know of it, as data."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import partial
from inspect import signature
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal

from longtake.data.rules import Companion, SampleRules
from longtake.diffusion.config import ObjectiveSection
from longtake.models.config import ModelSection

if TYPE_CHECKING:
    from longtake.buckets.protocol import BucketLaw
    from longtake.buckets.section import SizesSection
    from longtake.data.latents.source import LatentSource
    from longtake.diffusion.guidance import GuidanceRule
    from longtake.diffusion.known import KnownLaw
    from longtake.weights.training_folder import TrainingFolder

Tree = Mapping[str, Any]
SECTIONS_FILE = "longtake.json"  # sections of a run's config, beside weights that files of another program hold


@dataclass(frozen=True)
class Text:
    """A text encoder of a family."""

    section: str  # its key in a run's config
    condition: str  # the denoiser's condition that its embeddings become
    pooled: bool = False  # one vector for a caption, not one for each token
    masked: bool = False  # the denoiser gets a mask of the tokens that a caption really has
    # What stands for no text, in dropout and guidance alike: the encoded empty prompt, zeros, or a tensor of the
    # denoiser by its name; the latter two keep the caption's own mask.
    empty: Literal["prompt", "zeros"] | str = "prompt"


@dataclass(frozen=True)
class Spoken:
    """What a prompt in a family's own language says."""

    texts: tuple[str, ...]  # of each clip
    refs: str | None = None  # references, `;` between several
    kind: str | None = None  # of known places


@dataclass(frozen=True)
class Family:
    """One family of models. What needs torch is named by "module:name" and loaded when it is used."""

    name: str
    model: type[ModelSection]  # its `model` section, which names the denoiser
    objectives: tuple[type[ObjectiveSection], ...]  # the usual one first
    texts: tuple[Text, ...]
    weights: str  # the `weights.Format` of its files and adapters
    # What opens a checkpoint that another program's training has left, as "module:name": a folder ->
    # `weights.TrainingFolder`, None where it is none.
    training_folders: str | None = None
    # What makes the `diffusion.KnownLaw` of the `model` and `ae` sections: what may be known of samples; None: nothing.
    known: str | None = None
    # Kinds of that law, for some `model` section, and what each makes known; first: nothing.
    kinds: Mapping[str, str] = field(default_factory=dict)
    # Further kinds, of which there are many, as a pattern (`re`): such as a strategy written out, which the law reads.
    kind_pattern: str | None = None
    # The language of its prompts, as "module:name": (prompt, number of clips) -> `Spoken`; None: a prompt is a text.
    language: str | None = None
    # A `model` section -> why a run cannot give such a model what it reads, as one sentence; None where it can.
    refuses: Callable[[Any], str | None] = lambda model: None
    # A `model` section -> readers of conditioning frames in addition to the law's conditions (`diffusion.Reader`).
    readers: Callable[[Any], frozenset[str]] = lambda model: frozenset()
    # Largest share of a reference image's area that may be cropped to fit the video; None: any.
    reference_crop: float | None = None
    guided_by_known: bool = False  # a branch of guidance goes without it, beside the one without text
    guidance: Mapping[str, str] = field(default_factory=dict)  # `sampling_option.guidance_rule` -> a `GuidanceRule`
    # A config -> what takes frames of a clip to the captions it must have; None: it has one.
    segments: Callable[[Any], Callable[[int], int]] | None = None
    # What a storyboard writes behind the last text of a scene, and before the first of the next; None: nothing.
    scene_marks: tuple[str, str] | None = None
    quirks: Mapping[str, str] = field(default_factory=dict)  # name -> what the published program does otherwise
    # A quirk -> the keys of sections that are so by default where it is turned on.
    quirk_keys: Mapping[str, Mapping[str, Tree]] = field(default_factory=dict)
    rules: Callable[[Any], SampleRules] = lambda config: SampleRules()  # a config with its quirks -> clips to samples
    bucket_law: Callable[[frozenset[str]], str | None] = lambda quirks: None  # quirks -> a key of `buckets.LAWS`
    # A run's config -> a law of its own from the numbers of clips to buckets; None: that of `bucket_config`.
    bucket_rule: Callable[[Any], BucketLaw] | None = None
    sizes: type[SizesSection] | None = None  # options of a law of its own, which a run may give in place of that
    companions: Callable[[Any], tuple[Companion, ...]] = lambda model: ()  # a `model` section -> what clips bring along
    # Pattern of `dataset.latents` -> "module:name" of what opens such files as a `LatentSource`, given the run's config
    # and its clip table; what fits none is a store of ours.
    sources: Mapping[str, str] = field(default_factory=dict)
    # What a run of training has where the folder of its weights says another thing, by section.
    in_training: Mapping[str, Tree] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)  # defaults of `sampling_option` that are its own
    objective: Mapping[str, Any] = field(default_factory=dict)  # the same of its usual objective
    # A `model` section -> sections that shrink a run to a CPU's size: "model", "ae" and those of the text encoders.
    tiny: Callable[[Tree], Mapping[str, Tree]] = lambda model: {"model": {}}
    # A local folder -> what a whole published model in it says of a run's sections; None where it holds none.
    root: Callable[[str], Mapping[str, Tree] | None] = lambda folder: None

    @property
    def kind_of_nothing(self) -> str:
        """The kind of known places that makes nothing known; "" where no other kind is."""
        return next(iter(self.kinds), "")

    def has_kind(self, kind: str, model: ModelSection) -> bool:
        """Whether a model's law knows a kind of known places."""
        pattern = self.kind_pattern
        return kind in self.kinds_of(model) or (pattern is not None and bool(re.fullmatch(pattern, kind)))

    def kinds_of(self, model: ModelSection) -> Mapping[str, str]:
        """Return the kinds of a model's law, and what each makes known."""
        law = self.known_law(model)
        return {} if law is None else law.kinds

    def known_law(self, model: ModelSection, ae: Any = None) -> KnownLaw | None:
        """Return the law of what may be known of a model's samples; None where there is none. ae: the section of the
        autoencoder whose latents are known."""
        return None if self.known is None else resolve_name(self.known)(model, ae)

    def guidance_rule(self, name: str | None, numbers: Mapping[str, float]) -> GuidanceRule | None:
        """How the text scale changes over the steps; None: not at all. Raises `ValueError` for a number that is none of
        the rule's own."""
        if name is None:
            return None
        rule = resolve_name(self.guidance[name])
        own = list(signature(rule).parameters)[4:]
        if unknown := [number for number in numbers if number not in own]:
            fix = f"choose {', '.join(own)}" if own else "it has none"
            raise ValueError(f"sampling_option.guidance_numbers.{unknown[0]}: is no number of the rule {name!r}; {fix}")
        return partial(rule, **numbers)

    def spoken(self, prompt: str, num_clips: int) -> Spoken:
        """What a prompt for a video of so many clips says. Raises `UserError`."""
        return (
            Spoken((prompt,) * num_clips) if self.language is None else resolve_name(self.language)(prompt, num_clips)
        )

    @property
    def weight_format(self) -> Any:
        """How its weights and adapters lie in files."""
        return resolve_name(self.weights)

    def training_folder(self, folder: str) -> TrainingFolder | None:
        """Return a checkpoint that another program's training has left in a folder; None where it holds none."""
        opens = self.training_folders
        return None if opens is None else resolve_name(opens)(Path(folder).expanduser())

    def source_of(self, latents: str) -> Callable[[Any, Any], LatentSource] | None:
        """What opens files that another program has computed; None for a store of ours."""
        return next((resolve_name(name) for pattern, name in self.sources.items() if fnmatch(latents, pattern)), None)

    def keys_of(self, compat: str | tuple[str, ...] | None) -> dict[str, dict[str, Any]]:
        """Return the keys that quirks set, by section; names that are none of its own set nothing."""
        names = () if compat is None else (compat,) if isinstance(compat, str) else compat
        found: dict[str, dict[str, Any]] = {}
        for quirk, sections in self.quirk_keys.items():
            for name, keys in sections.items() if quirk in names or self.name in names else ():
                found[name] = {**found.get(name, {}), **keys}
        return found

    def quirks_of(self, compat: str | tuple[str, ...] | None) -> frozenset[str]:
        """Return the quirks that `compat` turns on; the family's name stands for all of its own. Raises `ValueError`
        for a name that is neither."""
        names = () if compat is None else (compat,) if isinstance(compat, str) else compat
        for name in names:
            if name != self.name and name not in self.quirks:
                own = ", ".join(self.quirks)
                choices = f"{self.name} (all of {own}) or some of these" if own else "nothing: it has no quirks"
                raise ValueError(f"compat = {name!r}: is no quirk of this model's family; choose {choices}")
        if self.name in names:
            return frozenset(self.quirks)
        return frozenset(names)
