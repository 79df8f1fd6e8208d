"""A trained model as a file or a folder: whole weights, with the config that they need in the header, or adapters."""

from __future__ import annotations

import json
from collections import ChainMap
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from longtake.buckets.aspect import aspect_table, frame_size, num_pixels
from longtake.buckets.entries import read_entries
from longtake.buckets.section import SizesSection
from longtake.checkpoint.export import CheckpointWeights
from longtake.checkpoint.runs import hold
from longtake.config.load import resolve
from longtake.contracts import UserError
from longtake.families.record import SECTIONS_FILE
from longtake.families.registry import family_of, read_model
from longtake.models.config import ModelSection
from longtake.small_files import regular
from longtake.system.config import SystemConfig
from longtake.system.pretrained import (
    TrainedParts,
    base_of_adapters,
    read_adapters_of,
    run_sections,
    run_tree,
    tree_of_denoiser,
)
from longtake.weights.conversion import ConvertedWeights
from longtake.weights.files import INDEX_FILE, MOST_FILE_BYTES, save_weights
from longtake.weights.format import Format
from longtake.weights.lora import save_adapters
from longtake.weights.torch_folder import save_torch_folder

CONFIG_HEADER = "longtake_config"
_BUCKETS = ("bucket_config", "sizes")  # keys of a training run


def export_model(
    checkpoint: str,
    target: str | Path,
    part: str = "ema",
    max_file_bytes: int = MOST_FILE_BYTES,
    prefix: str = "",
) -> Path:
    """Write the weights of a checkpoint to one `.safetensors` file that `longtake generate` takes by itself.

    A `target` of another name becomes a folder in Hugging Face's layout, of files of `max_file_bytes` at most.
    `checkpoint`: as for `--load`, also of a run that goes on; `part`: "ema" (the weights themselves where a run kept no
    average) or "model"; `prefix`: `folder.LOW_NOISE` for the second of two denoisers.
    """
    with hold(checkpoint) as folder:
        tree = system_tree(folder, prefix)
        model = read_model(tree)
        form = family_of(model).weight_format
        if tree.get("lora"):
            *styles, last = form.lora_styles
            raise UserError(
                f"{folder}: trained adapters; write --lora {', '.join(styles)} or {last} for these alone, or --merge "
                "for whole weights"
            )
        header = {CONFIG_HEADER: json.dumps(tree), **form.own(model).header}
        computed = form.namings[form.own(model).names].computed
        tables = {name: compute(model) for name, compute in computed.items() if compute is not None}
        return export_weights(folder, Path(target), part, header, max_file_bytes, tables, prefix)


def export_weights(
    checkpoint: Path,
    target: Path,
    part: str = "ema",
    header: Mapping[str, str] = MappingProxyType({}),
    max_file_bytes: int = MOST_FILE_BYTES,
    tables: Mapping[str, Tensor] = MappingProxyType({}),
    prefix: str = "",
) -> Path:
    """Write the trained weights of a checkpoint, and those of its run's `frozen/`; where what the run did not train
    has a file of its own, the header names that as `frozen_source`. `tables`: tensors that the model computes, and that
    other programs expect in its files."""
    weights = CheckpointWeights(checkpoint, wanted=part, partly=True, prefix=prefix)
    source = {} if weights.source is None else {"frozen_source": weights.source}
    heads = {name: (weights.dtype(name), weights.shape(name)) for name in sorted(weights)}
    heads |= {name: (table.dtype, tuple(table.shape)) for name, table in tables.items()}
    state = ChainMap(dict(tables), weights)
    save_weights(state, target, {"part": weights.part, **source, **header}, max_file_bytes, heads)
    return target


def export_adapters(checkpoint: str, target: str | Path, style: str, part: str = "ema", prefix: str = "") -> Path:
    """Write the adapters of a checkpoint in a style of its model's format and return `target`.

    `checkpoint`: as for `--load`, also of a run that goes on; `part`: "ema" (the adapters themselves where a run kept
    no average) or "model". Raises `UserError` where the run trained no adapters, for a style that the model does not
    have, and where `target` is named like a file and the style writes a folder, or the reverse.
    """
    target = Path(target)
    with hold(checkpoint) as folder:
        model, lora = run_sections(folder, prefix)
        form = family_of(model).weight_format
        if style not in form.lora_styles:
            raise UserError(f"--lora {style}: choose one of {', '.join(form.lora_styles)}")
        if (form.lora_styles[style].config == "file") == (target.suffix == ".safetensors"):
            file = target.suffix != ".safetensors"
            wanted = "a file, with the ending .safetensors" if file else "a folder, without an ending"
            raise UserError(f"{target}: adapters of {style} are {wanted}")
        adapters = read_adapters_of(CheckpointWeights(folder, wanted=part, partly=True, prefix=prefix))
    if not adapters:
        raise UserError(f"{folder}: holds no adapters, for its run trained without lora; leave --lora out")
    save_adapters(form, adapters, model, target, style, base_of_adapters(model.from_pretrained, lora))
    return target


def export_merged(
    checkpoint: str,
    target: str | Path,
    part: str = "ema",
    max_file_bytes: int = MOST_FILE_BYTES,
    prefix: str = "",
) -> Path:
    """Write whole weights, adapters merged into them, to a file or folder that `longtake generate` takes by itself.

    What the run did not train comes from the file that it started from, or from its `frozen/`. A merged weight is
    computed in float32 and rounded to the dtype in which that base is written. Raises `UserError` where the file of the
    base is gone.
    """
    with hold(checkpoint) as folder, ExitStack() as stack:
        tree = system_tree(folder, prefix)
        weights = TrainedParts(folder, part, stack, prefix)
        tree = {key: value for key, value in tree.items() if key not in ("lora", "freeze", "train_only")}
        tree["model"] = {**tree.get("model", {}), "from_pretrained": None}
        header = {CONFIG_HEADER: json.dumps(tree), **weights.metadata, "part": part}
        save_weights(weights, target, header, max_file_bytes)
    return Path(target)


def export_folder(
    checkpoint: str,
    target: str | Path,
    names: str,
    part: str = "ema",
    max_file_bytes: int = MOST_FILE_BYTES,
    prefix: str = "",
) -> Path:
    """Write whole weights, adapters merged into them, to a folder as other programs read it, `config.json` and all, or
    as PyTorch's distributed checkpoint has it.

    `names`: a naming of the model's format that has such folders. Raises `UserError` for any other, and as
    `export_merged`.
    """
    with hold(checkpoint) as folder, ExitStack() as stack:
        weights = TrainedParts(folder, part, stack, prefix)
        form = family_of(weights.model).weight_format
        check_folder(form, names)
        if names in form.torch_folders:
            write_torch_folder(form, names, weights, weights.model, target, system_tree(folder, prefix))
            return Path(target)
        layout = form.as_published(names)
        config = json.dumps(form.folders[names](weights.model), indent=2) + "\n"
        converted, beside = ConvertedWeights(form, weights, weights.model, layout), {"config.json": config}
        save_weights(converted, target, layout.header, max_file_bytes, stem=form.stem, beside=beside)
    return Path(target)


def check_folder(form: Format, names: str) -> None:
    """Raise `UserError` where a model's weights cannot be written as folders of this naming."""
    if names not in (can := (*form.folders, *form.torch_folders)):
        choices = f"choose {' or '.join(can)}" if can else "this model has none; leave it out"
        raise UserError(f"--as {names}: is no folder that can be written; {choices}")


def write_torch_folder(
    form: Format, names: str, state: Mapping[str, Any], model: ModelSection, target: str | Path, tree: Mapping[str, Any]
) -> None:
    """Write a model's tensors as a folder of PyTorch's distributed checkpoint, and beside them what a run's config, as
    plain data, says of the model, its latents, its texts and its objective."""
    others = ("ae", "objective", *(text.section for text in family_of(model).texts))
    sections = {name: tree[name] for name in others if "type" in tree.get(name, {})}
    own = {**tree.get("model", {}), "type": model.type, "from_pretrained": None}
    said = json.dumps({"model": own, **sections}, indent=2) + "\n"
    converted = ConvertedWeights(form, state, model, form.as_published(names))
    save_torch_folder(converted, Path(target), form.torch_folders[names], {SECTIONS_FILE: said})


def system_tree(checkpoint: Path, prefix: str = "") -> dict[str, Any]:
    """Return the keys of a checkpoint's run that say what its model is, how it is sampled, at the size of its
    buckets, and which buckets these are; of two denoisers, those of one (`prefix`)."""
    tree = tree_of_denoiser(run_tree(checkpoint), checkpoint, prefix)
    whole = {**tree, "sampling_option": {**said_sampling(tree), **trained_size(tree)}}
    return {key: value for key, value in whole.items() if key in SystemConfig.model_fields or key in _BUCKETS}


def is_exported_folder(path: str | Path) -> bool:
    """Return whether this folder has the files that `export_model` writes."""
    return any((Path(path) / name).is_file() for name in (INDEX_FILE, "model.safetensors"))


def exported_tree(path: str | Path) -> dict[str, Any]:
    """Return the config in the header of an exported file or folder, as plain data. Raises `UserError` for
    any other."""
    path = min(Path(path).glob("model*.safetensors"), default=path) if Path(path).is_dir() else path
    try:
        with safe_open(regular(Path(path)), framework="pt") as file:
            header = (file.metadata() or {}).get(CONFIG_HEADER)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read as safetensors ({error})") from error
    if header is None:
        raise UserError(
            f"{path}: holds no Longtake config; give a config file and --model.from_pretrained {path} instead"
        )
    return json.loads(header)


def said_sampling(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of `sampling_option` to which a run's config, as plain data, gives a value."""
    return {key: value for key, value in (tree.get("sampling_option") or {}).items() if value is not None}


def trained_size(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the size keys of `sampling_option` that a run's config, as plain data, leaves open, as its buckets decide
    them.

    `resolution`: the largest one that trains clips of several frames; where only stills are trained, the largest of
    these. `num_frames`: its longest length that the autoencoder can give back. `aspect_ratio`: only where the name of
    the resolution leaves a single one, as in `256px_ar1:1`. Nothing is decided for a run without buckets. Raises
    `UserError` for a config that is damaged.
    """
    said = said_sampling(tree)
    sizes = tree.get("sizes")
    if not (sizes or isinstance(tree.get("bucket_config"), Mapping)):
        return {}
    config = resolve(system_part(tree), [], SystemConfig, place="the run's config.py").value
    if sizes:
        own = SizesSection.model_validate(sizes).sampled(config)
        return {key: value for key, value in own.items() if key not in said}
    divisor, law = config.size_divisor, config.bucket_law
    trained = [
        (entry.num_frames > 1, num_pixels(name, law), entry.num_frames, name)
        for name, entries in read_entries(tree["bucket_config"], divisor, law=law).items()
        for entry in entries
        if entry.reachable
        and config.ae.has_length(entry.num_frames)
        and not config.model.refuses_length(config.ae.latent(entry.num_frames, 1, 1)[1])
    ]
    if not trained:
        return {}
    _, _, num_frames, name = max(trained)
    resolution, _, narrowed = name.partition("_")
    size: dict[str, Any] = {"resolution": resolution, "num_frames": num_frames}
    if narrowed:
        (size["aspect_ratio"],) = aspect_table(name, divisor, law=law)
    return {key: value for key, value in size.items() if key not in said}


def trained_shapes(tree: Mapping[str, Any]) -> dict[str, set[tuple[int, int, int]]]:
    """(T, H, W) of the buckets that a run's config, as plain data, lets clips take, and of the shapes that sampling has
    for the same aspect ratios, by resolution; empty for a run without buckets. Raises `UserError` for a config that is
    damaged."""
    sizes, buckets = (tree.get(key) for key in ("sizes", "bucket_config"))
    if not isinstance(sizes or buckets, Mapping):
        return {}
    config = resolve(system_part(tree), [], SystemConfig, place="the run's config.py").value
    divisor, law = config.size_divisor, config.bucket_law
    if sizes:
        found: dict[str, set[tuple[int, int, int]]] = {}
        for bucket in SizesSection.model_validate(sizes).law(config).buckets:
            shapes = found.setdefault(bucket.resolution, set())
            shapes |= {
                bucket.shape,
                (bucket.num_frames, *frame_size(bucket.resolution, bucket.ratio, divisor, law=law)),
            }
        return found
    return {
        name: {
            (entry.num_frames, *size)
            for entry in entries
            if entry.reachable
            for training in (True, False)
            for size in aspect_table(name, divisor, training, law).values()
        }
        for name, entries in read_entries(buckets, divisor, law=law).items()
    }


def system_part(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a training config that describe the model and its sampling; the others are the training run's
    own."""
    own = "parallel", "precision"
    return {key: value for key, value in tree.items() if key in SystemConfig.model_fields and key not in own}
