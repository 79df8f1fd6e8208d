"""Trained part of a denoiser: all of it, a part, or adapters upon it; and the initial values of adapters."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from longtake.contracts import UserError
from longtake.models.config import LoraConfig
from longtake.models.lora import AdapterSize, LoraLinear, adapt, freeze, frozen_names, target_layers
from longtake.parallel.shard import local_tensor, own_part
from longtake.system.config import SystemConfig
from longtake.weights.adapters import Adapters, summed, tensors_of
from longtake.weights.conversion import layer_names
from longtake.weights.format import Format
from longtake.weights.lora import count_text_encoder_tensors, find_adapters, read_adapters


def choose_trained(
    denoiser: nn.Module, config: SystemConfig, dtype: torch.dtype, kept: Adapters | None = None
) -> Adapters:
    """Give a denoiser on the meta device, before it is cut or sharded, its adapters, and freeze what does not train,
    kept in `dtype`. In place.

    Returns the adapters of `lora.from_pretrained`, else those `kept` of the run that this one starts from. Raises
    `UserError` for patterns that name nothing, and for a file of adapters that does not fit.
    """
    if config.lora is None:
        if config.freeze or config.train_only is not None:
            freeze(denoiser, dict.fromkeys(frozen_names(denoiser, config.freeze, config.train_only)), dtype)
        return {}
    adapters, form = kept or {}, config.family.weight_format
    if config.lora.from_pretrained:
        adapters = _read_files(config, config.lora)
    adapt(denoiser, adapter_sizes(form, denoiser, config.lora, adapters), config.lora.base, dtype)
    return adapters


def _read_files(config: SystemConfig, lora: LoraConfig) -> Adapters:
    """Return the adapters of `lora.from_pretrained`; with those of `lora.more` their sum, strengths within."""
    form = config.family.weight_format
    adapters = read_adapters(form, find_adapters(lora.from_pretrained), config.model)
    if not lora.more:
        return adapters
    others = [(read_adapters(form, find_adapters(name, "lora.more"), config.model), by) for name, by in lora.more]
    try:
        return summed([(adapters, lora.strength), *others])
    except ValueError as error:
        raise UserError(f"lora.more: {error}; merge one of the files into the weights, or leave it out") from None


def adapter_sizes(form: Format, denoiser: nn.Module, lora: LoraConfig, adapters: Adapters) -> dict[str, AdapterSize]:
    """Return the adapter of each layer that has one: those of a file as they are there, else as the section says."""
    if adapters:
        strength = 1.0 if lora.more else lora.strength  # a sum holds its strengths
        return {name: AdapterSize(a.rank, a.scaling, a.magnitude is not None, strength) for name, a in adapters.items()}
    size = AdapterSize(lora.rank, lora.scaling, lora.dora, lora.strength)
    names = layer_names(form, denoiser.config) if lora.targets is not None else {}
    return dict.fromkeys(target_layers(denoiser, lora.targets, form.lora_targets, names), size)


def lora_notes(lora: LoraConfig | None, adapters: Adapters) -> tuple[str, ...]:
    """Describe the adapters: their file, their strength, and what of it is excluded."""
    if lora is None or not lora.from_pretrained:
        return ()
    ranks = sorted({one.rank for one in adapters.values()})
    of = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
    more = "".join(f", and {name}, strength {by:g}" for name, by in lora.more)
    line = f"adapters: {len(adapters)} layers of {lora.from_pretrained}, {of}, strength {lora.strength:g}{more}"
    lines = [line]
    for name in (lora.from_pretrained, *(name for name, _ in lora.more)):
        if count := count_text_encoder_tensors(find_adapters(name)):
            lines.append(f"adapters: {count:,} tensors of {name} are for a text encoder and left out")
    return tuple(lines)


@torch.no_grad()
def start_adapters(denoiser: nn.Module, adapters: Adapters) -> None:
    """Fill what of the adapters follows from the base weights, then what comes from a file, on every mesh alike."""
    for layer in denoiser.modules():
        if isinstance(layer, LoraLinear) and layer.magnitude is not None:
            own = {name: local_tensor(p.data) for name, p in layer.named_parameters()}
            own["magnitude"].copy_(layer.row_lengths(own))
    fill(denoiser, tensors_of(adapters))


@torch.no_grad()
def fill(denoiser: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Copy whole tensors into parameters of these names, this rank's part of each."""
    for name, value in values.items():
        parameter = denoiser.get_parameter(name)
        local_tensor(parameter).copy_(own_part(value, parameter))
