"""What a generation is made from: a config file, a training run, one of its checkpoints, or an exported file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longtake.checkpoint import inspect, list_checkpoints, load_tensors, read_state, restore_frozen
from longtake.checkpoint import resolve as resolve_checkpoint
from longtake.config import Dialect, Resolved, key_names, load_config
from longtake.config import resolve as resolve_config
from longtake.contracts import UserError
from longtake.generate.config import GenerateConfig
from longtake.generate.words import Words
from longtake.system import (
    SamplingOption,
    System,
    SystemConfig,
    exported_tree,
    is_exported_folder,
    said_sampling,
    trained_size,
)
from longtake.system.pretrained import base_of_adapters
from longtake.system.tiny import TINY, is_tiny, tiny_layer, world_size

OF_TRAINING = frozenset({"bucket_config", "stages"})  # keys, one of which every run file of training has
Layer = tuple[str, Mapping[str, Any]]  # what messages call it, and its keys


@dataclass(frozen=True)
class Source:
    """A resolved generation config and, where it is made from a training run, the checkpoint to load."""

    config: GenerateConfig
    checkpoint: Path | None
    notes: tuple[str, ...] = ()  # what was decided without being asked


def resolve_source(run: str, overrides: Sequence[str], dialect: Dialect | None = None) -> Source:
    """Reads what `run` names. The model's own keys come from the run or exported file, the rest from `overrides`.

    `run`: a config file (.py, .toml), a `.safetensors` file or folder written by `longtake checkpoint export`, or
    anything that `--load` takes: a checkpoint folder, a run folder, a glob, `latest`. Raises `UserError` where it is
    none of these. `overrides` may have short flags (`words.SHORT`) and `--tiny`, which leaves weights out that are not
    of that size. `dialect`: the words that RUN and `overrides` are written in, where they are not Longtake's own.
    """
    path, words = Path(run), Words.read(overrides)
    if path.suffix in (".py", ".toml"):
        _refuse_training_file(path, dialect)
        return Source(read_generation(path, overrides, dialect).value, None)
    if path.suffix == ".safetensors" or is_exported_folder(path):
        tree = _system_part(exported_tree(path))
        tree["model"] = {**tree.get("model", {}), "from_pretrained": str(path)}
        resolved = _resolve(tree, words, dialect)
        _refuse_idle_strength(resolved)
        return Source(resolved.value, None)
    checkpoint = resolve_checkpoint(run)
    file = checkpoint.parent / "config.py"
    if not file.exists():
        raise UserError(f"{checkpoint.parent}: no config.py beside the checkpoint; give the folder of a training run")
    of_run = load_config(file, [], dict[str, Any]).tree
    size, place = trained_size(of_run), f"bucket_config of {checkpoint.parent}"
    tree = {**_system_part(of_run), "sampling_option": {**said_sampling(of_run), **size}}
    source = (read_state(checkpoint).get("frozen") or {}).get("source")  # of what the run did not train
    tree["model"] = {**tree.get("model", {}), "from_pretrained": source}
    resolved = _resolve(tree, words, dialect, [(place, {"sampling_option": size})])  # so that its origin is known
    as_trained = resolved.value.model.from_pretrained == source
    if not (as_trained and tree.get("lora")):
        _refuse_idle_strength(resolved)
    own = as_trained and (not words.tiny or is_tiny(tree))
    return Source(resolved.value, checkpoint if own else None, _size_notes(resolved, place))


def read_generation(path: Path, overrides: Sequence[str], dialect: Dialect | None = None) -> Resolved[GenerateConfig]:
    """The config of a run file of generation, with where each value comes from; `overrides` as for `resolve_source`.

    Raises `ConfigError`, and `UserError` for a strength of adapters that are not there.
    """
    words = Words.read(overrides)
    over = _over(load_config(path, [], dict[str, Any], dialect=dialect).tree) if words.tiny else ()
    resolved = load_config(path, words.overrides, GenerateConfig, over, dialect)
    _refuse_idle_strength(resolved)
    return resolved


def load_weights(system: System, checkpoint: Path, ema: bool) -> str:
    """Fills the denoiser from a checkpoint: its averaged weights where wanted and there, else the weights themselves.

    What the run did not train is there already, or comes from its `frozen/`. Adapters of `lora.from_pretrained` stay
    upon weights that know none. Returns which were taken, "ema" or "model". Collective. Raises `UserError` where the
    checkpoint is of another model.
    """
    contents = inspect(checkpoint)
    part = "ema" if ema and "ema" in contents.totals else "model"
    held = {row.name for row in contents.rows if row.part == part}
    parameters = {f"{part}.{name}": p.data for name, p in system.denoiser.named_parameters()}
    adapters = {f"{part}.{name}" for name in system.adapter_parameters()}
    given = _given_adapters(system.config, own=bool(adapters & held))
    wanted = {name: value for name, value in parameters.items() if name in held or (name in adapters and not given)}
    loaded = load_tensors(checkpoint, wanted, strict=not given)  # under adapters, weights are kept in their own dtype
    if loaded.surplus:
        raise UserError(f"{checkpoint}: holds {loaded.surplus[0]}, which the model does not have; give its own config")
    rest = {name: value for name, value in parameters.items() if name not in held | adapters}
    frozen = {name.replace(part, "model", 1): value for name, value in rest.items()}
    restore_frozen(checkpoint, frozen, read_state(checkpoint).get("frozen"))
    return part


def _given_adapters(config: SystemConfig, own: bool) -> bool:
    """Whether adapters come from a file, to be put upon a checkpoint; `own`: it has some. Raises `UserError`."""
    if config.lora is None or config.lora.from_pretrained is None:
        return False
    if own:
        raise UserError(
            f"lora.from_pretrained = {config.lora.from_pretrained!r}: the run has adapters of its own; merge them "
            "first with longtake checkpoint export --merge"
        )
    if config.lora.base != "dense":
        raise UserError(
            f'lora.base = "{config.lora.base}": weights are coded as they are read from a file; export the checkpoint '
            'first, or choose "dense"'
        )
    return True


def _refuse_training_file(path: Path, dialect: Dialect | None) -> None:
    if not (of_training := OF_TRAINING & key_names(path, dialect)):
        return
    run = path.parent if list_checkpoints(path.parent) else "outputs/NAME"
    raise UserError(
        f"{path}: has {min(of_training)}, so it is a run file of training; give the folder of the run that it trained, "
        f"{run}, or a preset of configs/opensora_v2/inference with --model.from_pretrained {run}"
    )


def _refuse_idle_strength(resolved: Resolved[GenerateConfig]) -> None:
    """Raises `UserError` for a strength of adapters where none lie upon the weights."""
    lora, weights = resolved.value.lora, resolved.value.model.from_pretrained
    place = resolved.origins.get("lora.strength")
    if lora is None or place is None or lora.from_pretrained is not None:
        return
    if (lora.strength != 1 or place.is_flag) and base_of_adapters(weights, lora) == weights:
        raise UserError(
            f"lora.strength = {lora.strength:g} ({place}): there are no adapters that it could be of; name their file "
            "with --lora FILE, or give the folder of a run that trained adapters"
        )


def _resolve(
    tree: Mapping[str, Any], words: Words, dialect: Dialect | None, over: Sequence[Layer] = ()
) -> Resolved[GenerateConfig]:
    over = [*over, *(_over(tree, keep_model=is_tiny(tree)) if words.tiny else ())]
    return resolve_config(tree, words.overrides, GenerateConfig, over=over, dialect=dialect)


def _size_notes(resolved: Resolved[GenerateConfig], place: str) -> tuple[str, ...]:
    """A line on what of the videos' size comes from `place`, the run's buckets; none where nothing does."""
    option = resolved.value.sampling_option
    told = {
        "resolution": option.resolution,
        "aspect_ratio": option.aspect_ratio,
        "num_frames": "1 frame" if option.num_frames == 1 else f"{option.num_frames} frames",
    }
    origins = {key: resolved.origins.get(f"sampling_option.{key}") for key in told}
    taken = [key for key, origin in origins.items() if origin is not None and origin.place == place]
    if not taken:
        return ()
    flags = ", ".join(f"--{key.replace('_', '-')}" for key in taken)
    choice = "chooses another" if len(taken) == 1 else "choose others"
    return (f"{', '.join(told[key] for key in taken)}, as in the run's bucket_config; {flags} {choice}",)


def _over(tree: Mapping[str, Any], keep_model: bool = False) -> tuple[Layer, ...]:
    """The layer of `--tiny`; what a tree leaves to the defaults of sampling is shrunk too.

    keep_model: the model is tiny and keeps its weights; the videos alone are shrunk.
    """
    option = tree.get("sampling_option")
    whole = SamplingOption().model_dump() | (dict(option) if isinstance(option, Mapping) else {})
    layer = tiny_layer({**tree, "sampling_option": whole}, world_size())
    keys = {"sampling_option"} if keep_model else GenerateConfig.model_fields.keys()
    return ((TINY, {key: value for key, value in layer.items() if key in keys}),)


def _system_part(tree: dict[str, Any]) -> dict[str, Any]:
    """The keys of a training config that describe the model and how it is sampled.

    How training was spread over its processes is left out: a generation has its own number of them.
    """
    return {key: value for key, value in tree.items() if key in SystemConfig.model_fields and key != "parallel"}
