"""Options that a row of a table of prompts has of its own: size, length, seed, steps, guidance, adapters' strength."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from pydantic import ValidationError
from torch import nn

from longtake.contracts import UserError
from longtake.generate.config import GenerateConfig
from longtake.generate.prompts import Prompt
from longtake.generate.sample import shape_asked
from longtake.models.lora import LoraLinear


def own_config(prompt: Prompt, config: GenerateConfig) -> GenerateConfig:
    """Return the generation of one prompt. Raises `UserError`, without the row, for options that its model
    cannot make."""
    options = {key: value for key, value in prompt.options if key not in ("seed", "lora_strength")}
    if not options:
        return config
    if config.use_t2i2v:
        raise UserError(f"{', '.join(options)} with use_t2i2v, which makes all videos alike")
    try:
        tree = {**dict(config), "sampling_option": {**config.sampling_option.model_dump(), **options}}
        own = GenerateConfig.model_validate(tree)
        own.check_shape(*shape_asked(own, own.sampling_option))
    except ValidationError as error:
        fault = error.errors()[0]
        key, said = str((fault["loc"] or ("",))[-1]), fault["msg"].removeprefix("Value error, ")
        raise UserError(f"{key} = {options[key]}: {said}" if key in options else said) from None
    return own


def seed_of(prompt: Prompt, usual: int) -> int:
    """Return the seed of a prompt's first video."""
    return int(_options(prompt).get("seed", usual))


def suffix_of(prompt: Prompt, config: GenerateConfig) -> str:
    """Return the suffix of a prompt's files."""
    return ".png" if _options(prompt).get("num_frames", config.sampling_option.num_frames) == 1 else ".mp4"


@contextmanager
def adapter_strength(models: Sequence[nn.Module], prompt: Prompt) -> Iterator[None]:
    """Set the models' adapters to the strength in a prompt's row, if any, inside the context."""
    wanted = _options(prompt).get("lora_strength")
    every = (layer for model in models for layer in model.modules()) if wanted is not None else ()
    layers = [layer for layer in every if isinstance(layer, LoraLinear)]
    usual = [layer.strength for layer in layers]
    for layer in layers:
        layer.strength = float(wanted or 0)
    try:
        yield
    finally:
        for layer, strength in zip(layers, usual, strict=True):
            layer.strength = strength


def _options(prompt: Prompt) -> Mapping[str, object]:
    return dict(prompt.options)
