"""The source of a generation: a config file, a training run, one of its checkpoints, or an exported file."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from longtake.checkpoint.contents import inspect
from longtake.checkpoint.folder import LOW_NOISE
from longtake.checkpoint.frozen import restore_frozen
from longtake.checkpoint.load import load_tensors
from longtake.checkpoint.runs import list_checkpoints
from longtake.checkpoint.runs import resolve as resolve_checkpoint
from longtake.checkpoint.state import RunState
from longtake.config.load import Dialect, Resolved, key_names, load_config
from longtake.config.load import resolve as resolve_config
from longtake.contracts import UserError
from longtake.generate.config import GenerateConfig
from longtake.generate.options import own_config
from longtake.generate.read import (
    OF_TRAINING,
    Flags,
    Layer,
    read_flags,
    read_generation,
    refuse_idle_strength,
    tiny_layers,
)
from longtake.generate.requests import prompts_of, shape_of
from longtake.models.config import LoraConfig
from longtake.parallel.shard import local_tensor
from longtake.system.build import System
from longtake.system.export import (
    exported_tree,
    is_exported_folder,
    said_sampling,
    system_part,
    trained_shapes,
    trained_size,
)
from longtake.system.pretrained import run_tree
from longtake.system.tiny import is_tiny
from longtake.tensor_files import check_finite

_MOST_LISTED = 8  # lengths and shapes of a run in a line


@dataclass(frozen=True)
class GenerationSource:
    """A resolved generation config and, for a training run, the checkpoint to load."""

    config: GenerateConfig
    checkpoint: Path | None
    notes: tuple[str, ...] = ()  # defaults that were taken from the run


def resolve_source(run: str, overrides: Sequence[str], dialect: Dialect | None = None) -> GenerationSource:
    """Read what `run` names. The model's keys come from the run or exported file, the rest from `overrides`.

    `run`: a config file, a `.safetensors` file or folder written by `longtake checkpoint export`, or anything that
    `--load` takes. `overrides` may have short flags (`read.SHORT`) and `--tiny`, which skips weights of another size.
    `dialect`: that of both. Raises `UserError` where `run` is none of these.
    """
    path, words = Path(run), read_flags(overrides)
    if path.suffix in (".py", ".toml"):
        _refuse_training_file(path, dialect)
        resolved = read_generation(path, overrides, dialect)
        if (scale := _scale_of_weights(resolved)) is None:
            return GenerationSource(resolved.value, None)
        place = resolved.value.model.from_pretrained
        config = read_generation(path, [*overrides, "--ae.scale_factor", str(scale)], dialect).value
        return GenerationSource(config, None, (f"ae.scale_factor = {scale}: that of {place}",))
    if path.suffix == ".safetensors" or is_exported_folder(path):
        of_run = exported_tree(path)
        tree = system_part(of_run)
        tree["model"] = {**tree.get("model", {}), "from_pretrained": str(path)}
        resolved = _resolve(tree, words, dialect)
        refuse_idle_strength(resolved)
        return GenerationSource(resolved.value, None, () if words.tiny else _untrained_notes(resolved.value, of_run))
    checkpoint = resolve_checkpoint(run)
    of_run = run_tree(checkpoint)
    size = trained_size(of_run)
    place = f"{'sizes' if of_run.get('sizes') else 'bucket_config'} of {checkpoint.parent}"
    tree = {**system_part(of_run), "sampling_option": {**said_sampling(of_run), **size}}
    state = RunState.read(checkpoint)
    source = state.frozen_source  # of what the run did not train
    tree["model"] = {**tree.get("model", {}), "from_pretrained": source}
    resolved = _resolve(tree, words, dialect, [(place, {"sampling_option": size})])  # so that its origin is known
    as_trained = resolved.value.model.from_pretrained == source
    if not (as_trained and tree.get("lora")):
        refuse_idle_strength(resolved)
    own = as_trained and (not words.tiny or is_tiny(tree))
    notes = _size_notes(resolved, place)
    if state.objective is not None:
        notes += (f"objective: trained with {state.objective.name}; sampled by the config's own",)
    if not words.tiny:
        notes += _untrained_notes(resolved.value, of_run)
    return GenerationSource(resolved.value, checkpoint if own else None, notes)


def _scale_of_weights(resolved: Resolved[GenerateConfig]) -> float | None:
    """Return the scale factor of the latents of an exported or converted file or folder of weights, where a run file
    has another value; None where it is unknown, or a flag sets it."""
    weights, origin = resolved.value.model.from_pretrained, resolved.origins.get("ae.scale_factor")
    if weights is None or (origin is not None and origin.is_flag):
        return None
    path = Path(weights).expanduser()
    if not (path.is_file() and path.suffix == ".safetensors") and not is_exported_folder(path):
        return None
    try:
        own = exported_tree(path).get("ae", {})
    except UserError:  # of another program
        return None
    said, kind = own.get("scale_factor"), own.get("type")
    return said if kind == resolved.value.ae.type and said not in (None, resolved.value.ae.scale) else None


def trains_low_noise(checkpoint: Path) -> bool:
    """Return whether a checkpoint is of a run that trained two denoisers."""
    return LOW_NOISE + "model" in inspect(checkpoint).totals


def load_weights(system: System, checkpoint: Path, ema: bool) -> str:
    """Load the denoiser's weights from a checkpoint, averaged (EMA) where wanted and saved; return the part of the
    checkpoint that they are, such as "ema" or "model".

    Weights that the run did not train are loaded already, or come from its `frozen/`; adapters of
    `lora.from_pretrained` stay where the checkpoint has none. Collective. Raises `UserError` for another model's.
    """
    contents, prefix = inspect(checkpoint), system.prefix
    part = prefix + ("ema" if ema and prefix + "ema" in contents.totals else "model")
    held = {row.name for row in contents.rows if row.part == part}
    parameters = {f"{part}.{name}": p.data for name, p in system.denoiser.named_parameters()}
    adapters = {f"{part}.{name}" for name in system.adapter_parameters()}
    given = bool(system.config.lora and system.config.lora.from_pretrained)
    if given:
        _check_given_adapters(system.config.lora, own=bool(adapters & held), checkpoint=checkpoint)
    wanted = {name: value for name, value in parameters.items() if name in held or (name in adapters and not given)}
    loaded = load_tensors(
        checkpoint, wanted, strict=not given, convert=True
    )  # an EMA is float32, whatever the run trains
    if loaded.surplus:
        raise UserError(f"{checkpoint}: holds {loaded.surplus[0]}, which the model does not have; give its own config")
    rest = {name: value for name, value in parameters.items() if name not in held | adapters}
    frozen = {name.replace(part, "model", 1): value for name, value in rest.items()}
    facts = RunState.read(checkpoint).frozen_of(prefix)
    if frozen and facts is None:
        lacking = min(frozen).removeprefix("model.")
        raise UserError(f"{checkpoint}: has no {lacking}, which the model asked for has; give the run's own model keys")
    restore_frozen(checkpoint, frozen, facts, prefix=prefix)
    return part


def check_loaded(denoiser: nn.Module, checkpoint: Path) -> None:
    """Raise `UserError` where this rank's part of a parameter holds NaN or infinity."""
    for name, parameter in denoiser.named_parameters():
        check_finite(local_tensor(parameter.data), str(checkpoint), name)


def _check_given_adapters(lora: LoraConfig, own: bool, checkpoint: Path) -> None:
    """Raise `UserError` where adapters of a file cannot be applied to a checkpoint; `own`: it has some itself."""
    if own:
        raise UserError(
            f"lora.from_pretrained = {lora.from_pretrained!r}: the run has adapters of its own; merge them first: "
            f"`longtake checkpoint export {shlex.quote(str(checkpoint))} merged.safetensors --merge`"
        )
    if lora.base != "dense":
        raise UserError(
            f'lora.base = "{lora.base}": weights are quantised as they are read from a file; export the checkpoint '
            'first, or choose "dense"'
        )


def _refuse_training_file(path: Path, dialect: Dialect | None) -> None:
    if not (of_training := OF_TRAINING & key_names(path, dialect)):
        return
    run = path.parent
    if not list_checkpoints(run):
        tree = load_config(path, [], dict[str, Any], dialect=dialect).tree
        run = Path(str(tree.get("outputs", "outputs"))) / str(tree.get("exp_name", "NAME"))
    raise UserError(
        f"{path}: has {min(of_training)}, so it is a run file of training; give the folder of the run that it trained, "
        f"such as {run}, a file exported from it, or a run file of generation (`longtake preset` lists some)"
    )


def _resolve(
    tree: Mapping[str, Any], words: Flags, dialect: Dialect | None, over: Sequence[Layer] = ()
) -> Resolved[GenerateConfig]:
    over = [*over, *(tiny_layers(tree, keep_model=is_tiny(tree)) if words.tiny else ())]
    return resolve_config(tree, words.overrides, GenerateConfig, over=over, dialect=dialect)


def _untrained_notes(config: GenerateConfig, of_run: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a line for each length, size or shape of the videos that no bucket of the run has, with what it trained
    on."""
    by_resolution = {name: shapes for name, shapes in trained_shapes(of_run).items() if shapes}
    every = set().union(*by_resolution.values())
    if not every:
        return ()
    asked = {shape_of(config)} if config.prompts is None else set(_shapes_of_rows(config))
    trained = "; ".join(
        f"{name} ({_listed({shape[0] for shape in shapes})} frames of "
        f"{_listed(f'{height} x {width}' for _, height, width in shapes)})"
        for name, shapes in by_resolution.items()
    )
    notes = []
    for num_frames, *size in sorted(asked - every):
        reason = "in that length" if any(list(shape[1:]) == size for shape in every) else "in that size or shape"
        shape = " x ".join(map(str, (num_frames, *size)))
        notes.append(f"{shape}: the run has not trained {reason}; it trained on {trained}")
    return tuple(notes)


def _shapes_of_rows(config: GenerateConfig) -> Iterator[tuple[int, int, int]]:
    """(T, H, W) of the rows of a table of prompts; `check_request` reports errors of the table."""
    with suppress(UserError):
        for prompt in prompts_of(config, []):
            yield shape_of(own_config(prompt, config))


def _listed(values: Iterable[int | str]) -> str:
    """Return the first values in order, and how many more there are."""
    distinct = sorted(set(values))
    rest = len(distinct) - _MOST_LISTED
    return ", ".join(map(str, distinct[:_MOST_LISTED])) + (f" and {rest} more" if rest > 0 else "")


def _size_notes(resolved: Resolved[GenerateConfig], place: str) -> tuple[str, ...]:
    """Return a line on which sizes of the videos come from `place`, the run's buckets; none where none does."""
    option = resolved.value.sampling_option
    sizes = {
        "resolution": option.resolution,
        "aspect_ratio": option.aspect_ratio,
        "num_frames": "1 frame" if option.num_frames == 1 else f"{option.num_frames} frames",
    }
    origins = {key: resolved.origins.get(f"sampling_option.{key}") for key in sizes}
    taken = [key for key, origin in origins.items() if origin is not None and origin.place == place]
    if not taken:
        return ()
    flags = ", ".join(f"--{key.replace('_', '-')}" for key in taken)
    choice = "chooses another" if len(taken) == 1 else "choose others"
    return (f"{', '.join(sizes[key] for key in taken)}, as in the run's {place.split()[0]}; {flags} {choice}",)
