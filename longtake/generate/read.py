"""Reads and checks generation configs and flags without building a model, so that `config show` is fast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from longtake.config.load import Dialect, Resolved, load_config
from longtake.contracts import UserError
from longtake.generate.config import GenerateConfig
from longtake.system.config import SamplingOption
from longtake.system.tiny import TINY, take_tiny, tiny_layer, world_size

OF_TRAINING = frozenset({"bucket_config", "sizes", "stages"})  # every training config has one of these keys
Layer = tuple[str, Mapping[str, Any]]  # its name in messages, and its keys
# Short flag -> its key. `--lora.NAME` is a key of that section as it is.
SHORT = {
    "resolution": "sampling_option.resolution",
    "aspect_ratio": "sampling_option.aspect_ratio",
    "num_frames": "sampling_option.num_frames",
    "num_steps": "sampling_option.num_steps",
    "guidance": "sampling_option.guidance",
    "guidance_img": "sampling_option.guidance_img",
    "seed": "sampling_option.seed",
    "lora": "lora.from_pretrained",
    "lora_scale": "lora.strength",
    "lora_more": "lora.more",
}


class Flags(NamedTuple):
    """The command line after RUN: overrides of the config, and whether `--tiny` is among them."""

    overrides: tuple[str, ...]
    tiny: bool = False


def read_flags(words: Sequence[str]) -> Flags:
    """Replace short flags by their keys, in order. Raises `UserError` where a flag and its key differ in value."""
    own, tiny = take_tiny(words)
    overrides: list[str] = []
    given: dict[str, dict[str, str]] = {}  # key -> how it is spelled -> its last value
    for word, following in zip(own, [*own[1:], "--"], strict=False):
        name, equals, value = word.partition("=")
        plain = name.removeprefix("--").replace("-", "_")
        if name.startswith("--"):
            value = value if equals or following.startswith("--") else following
            given.setdefault(SHORT.get(plain, plain), {})[plain] = value
            if plain in SHORT:
                word = word.replace(name, f"--{SHORT[plain]}", 1)
        overrides.append(word)
    for spellings in given.values():
        if len(set(spellings.values())) > 1:
            (first, one), (second, other) = spellings.items()
            raise UserError(f"--{first} {one}: stands for the same key as --{second} {other}; keep one of the two")
    return Flags(tuple(overrides), tiny)


def read_generation(path: Path, overrides: Sequence[str], dialect: Dialect | None = None) -> Resolved[GenerateConfig]:
    """Return a generation config with the origin of each value; `overrides` as for `resolve_source`. Raises
    `ConfigError`, and `UserError` for `lora.strength` without adapters."""
    words = read_flags(overrides)
    over = tiny_layers(load_config(path, [], dict[str, Any], dialect=dialect).tree) if words.tiny else ()
    resolved = load_config(path, words.overrides, GenerateConfig, over, dialect)
    refuse_idle_strength(resolved)
    return resolved


def refuse_idle_strength(resolved: Resolved[GenerateConfig]) -> None:
    """Raise `UserError` for `lora.strength` where there are no adapters."""
    lora, weights = resolved.value.lora, resolved.value.model.from_pretrained
    place = resolved.origins.get("lora.strength")
    if lora is None or place is None or lora.from_pretrained is not None:
        return
    from longtake.system.pretrained import base_of_adapters

    if (lora.strength != 1 or place.is_flag) and base_of_adapters(weights, lora) == weights:
        raise UserError(
            f"lora.strength = {lora.strength:g} ({place}): there are no adapters; name their file with --lora FILE, or "
            "give the folder of a run that trained adapters"
        )


def tiny_layers(tree: Mapping[str, Any], keep_model: bool = False) -> tuple[Layer, ...]:
    """Return the overrides of `--tiny`, which shrink sampling defaults too; keep_model: the model is tiny already,
    and only the videos shrink."""
    option = tree.get("sampling_option")
    whole = SamplingOption().model_dump() | (dict(option) if isinstance(option, Mapping) else {})
    layer = tiny_layer({**tree, "sampling_option": whole}, world_size())
    keys = {"sampling_option"} if keep_model else GenerateConfig.model_fields.keys()
    return ((TINY, {key: value for key, value in layer.items() if key in keys}),)
