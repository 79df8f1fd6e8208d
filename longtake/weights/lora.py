"""Adapter files: ours to those of PEFT, diffusers, ComfyUI and CogVideoX-Fun and back.

| style     | layers                                   | tensors                          | alpha                  |
|-----------|------------------------------------------|----------------------------------|------------------------|
| peft      | `base_model.model.` and a model's names  | lora_A, lora_B                   | `adapter_config.json`  |
| diffusers | `transformer.` and diffusers' names      | lora_A, lora_B                   | multiplied into B      |
| comfy     | `lora_unet_` and ComfyUI's names (kohya) | lora_down, lora_up, dora_scale   | `.alpha` tensors       |

A model's `Format` says which styles it has, and in which naming. With alpha multiplied into B a reader of tensors alone
gets the trained strength, and diffusers takes no tensor for alpha.
"""

from __future__ import annotations

import json
import os
import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longtake.contracts import UserError
from longtake.durable import write_whole
from longtake.hub import find_files
from longtake.tensor_files import check_finite
from longtake.weights.adapters import Adapter, Adapters, adapters_of, convert_adapters, tensors_of
from longtake.weights.conversion import file_tensors
from longtake.weights.files import WeightFiles, save_weights
from longtake.weights.format import AdapterStyle, Format, WeightLayout, rope_in
from longtake.weights.lora_config import (
    CONFIG_HEADER,
    PEFT_CONFIG,
    AdapterConfig,
    positive_number,
    read_config,
    read_header,
)
from longtake.weights.lora_names import Role, flattened, is_of_text_encoder, other_kind, parse_name

_PEFT_FILE = "adapter_model.safetensors"
_PUBLISHED_FILE = "pytorch_lora_weights.safetensors"  # diffusers' name for it
_PEFT_ENDS = {"a": "lora_A.weight", "b": "lora_B.weight", "magnitude": "lora_magnitude_vector"}
_KOHYA_ENDS = {"a": "lora_down.weight", "b": "lora_up.weight", "magnitude": "dora_scale", "alpha": "alpha"}
PEFT = AdapterStyle(_PEFT_ENDS, "base_model.model.", config="file")
DIFFUSERS_STYLE = AdapterStyle(_PEFT_ENDS, "transformer.", config="header", folds_alpha=True)
KOHYA = AdapterStyle(_KOHYA_ENDS, "lora_unet_", flat=True)
_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def save_adapters(
    form: Format, adapters: Adapters, config: Any, path: str | os.PathLike[str], style: str, base: str | None = None
) -> list[Path]:
    """Write adapters of a model of `config` in one of its format's styles and return the files written.

    `path`: a folder for a style that has its config in a file, a `.safetensors` file for others. `base`: the weights
    they belong to, as PEFT's config names them. Raises `UserError` where `path` exists, or a layer has no name in the
    style.
    """
    path, kind, own = Path(path), form.lora_styles[style], form.own(config)
    check_style(form, adapters, config, style)
    layout = own if kind.names is None else form.as_published(kind.names)
    converted = convert_adapters(form, adapters, config, own, layout)
    if kind.folds_alpha:
        converted = {layer: replace(one, b=one.b * one.scaling, scaling=1.0) for layer, one in converted.items()}
    kernels = {layer: _kernel(form, layer, config, layout) for layer in converted}
    tensors, settings = _named(converted, kind, kernels), peft_config(converted)
    of_kohya = {"ss_network_dim": settings["r"], "ss_network_alpha": settings["lora_alpha"]}
    header = {key: str(value) for key, value in of_kohya.items() if "alpha" in kind.ends} | dict(layout.header)
    if kind.config == "header":
        facts = {kind.prefix + key: value for key, value in settings.items()}
        return save_weights(tensors, path, {CONFIG_HEADER: json.dumps(facts), **header})
    if kind.config is None:
        return save_weights(tensors, path, header)
    if (path / _PEFT_FILE).exists() or path.is_file():
        raise UserError(f"{path}: holds adapters already, which are not overwritten; choose another folder")
    facts = json.dumps({**settings, "base_model_name_or_path": base}, indent=1) + "\n"
    files = [*save_weights(tensors, path / _PEFT_FILE, layout.header), path / PEFT_CONFIG]
    write_whole(files[-1], facts)
    return files


def check_style(form: Format, adapters: Adapters, config: Any, style: str) -> None:
    """Raise `UserError` where files of a style cannot hold these adapters, whose values are not looked at."""
    kind, own = form.lora_styles[style], form.own(config)
    layout = own if kind.names is None else form.as_published(kind.names)
    tensors = {name: tensor.detach().to("meta") for name, tensor in tensors_of(adapters).items()}
    for layer, adapter in convert_adapters(form, adapters_of(tensors, 1.0), config, own, layout).items():
        if layer in kind.lacks or (adapter.magnitude is not None and _kernel(form, layer, config, layout)):
            reason = "no such layer" if layer in kind.lacks else "no DoRA of a convolution"
            raise UserError(
                f"lora.targets: reaches {layer}, but {style} files have {reason}; choose other layers or styles"
            )


def _kernel(form: Format, layer: str, config: Any, layout: WeightLayout) -> tuple[int, ...]:
    """Channels and kernel of a layer that such files have as a convolution and the model as a linear layer; else ()."""
    kept = form.namings[layout.names].form_of(f"{layer}.weight")
    shape = () if kept is None else kept.shape(config)
    return shape[1:] if len(shape) > 2 else ()


def _named(adapters: Adapters, style: AdapterStyle, kernels: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    tensors = {}
    for layer, adapter in adapters.items():
        values = {"a": adapter.a, "b": adapter.b}
        if kernel := kernels[layer]:
            values = {"a": adapter.a.unflatten(1, kernel), "b": adapter.b[..., *[None] * (len(kernel) - 1)]}
        if adapter.magnitude is not None:
            # Comfy reads off the shape [out, 1] that rows are scaled.
            values["magnitude"] = adapter.magnitude[:, None] if style.flat else adapter.magnitude
        if "alpha" in style.ends:
            values["alpha"] = torch.tensor(adapter.alpha)
        start = style.prefix + (layer.replace(".", "_") if style.flat else layer)
        tensors |= {f"{start}.{style.ends[role]}": value for role, value in values.items()}
    return tensors


def peft_config(adapters: Adapters) -> dict[str, Any]:
    """PEFT's `LoraConfig` of these adapters, as plain data: the commonest rank and alpha, and exceptions."""
    ranks = {layer: adapter.rank for layer, adapter in adapters.items()}
    alphas = {layer: adapter.alpha for layer, adapter in adapters.items()}
    rank, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        # `^`: without it a name also stands for every longer one that ends with it
        "rank_pattern": {f"^{layer}": value for layer, value in ranks.items() if value != rank},
        "alpha_pattern": {f"^{layer}": value for layer, value in alphas.items() if value != alpha},
        "target_modules": sorted(adapters),
        "use_dora": any(adapter.magnitude is not None for adapter in adapters.values()),
        "lora_dropout": 0.0,
        "bias": "none",
    }


def read_adapters(form: Format, path: str | os.PathLike[str], config: Any) -> dict[str, Adapter]:
    """Return the adapters in a file of any style, or in PEFT's folder, for the layers of a model of `config`.

    Names say the style. Alpha comes from tensors, the file's header, or PEFT's config of that file; else it is the
    rank. Tensors for a text encoder are left out (`count_text_encoder_tensors`). Raises `UserError` for tensors that
    belong to no layer of the model, for other sizes, and for values that are not finite numbers.
    """
    files = _open(path)
    place, layers, settings = str(files.path), _by_layer(files), _facts(files)
    alphas = settings.alphas([found.layer for found in layers.values()])
    raw = {key: _adapter(files, found, alphas[found.layer], settings.rslora) for key, found in layers.items()}
    layout, names = _recognised(form, layers, config, files.metadata, place)
    named = {names[key]: adapter for key, adapter in raw.items()}
    _check_sizes(form, named, config, layout, place)
    return convert_adapters(form, named, config, layout, form.own(config))


def count_text_encoder_tensors(path: str | os.PathLike[str]) -> int:
    """Return the number of tensors of a file of adapters that adapt a text encoder."""
    return sum(map(is_of_text_encoder, _open(path)))


def find_adapters(name: str, key: str = "lora.from_pretrained") -> Path:
    """Return the local file or folder that a name of adapters stands for: a path, or a name on the Hugging Face hub.

    `owner/name` is PEFT's folder, or diffusers' file in one. Raises `UserError` as `find_files`, and for
    a run's folder.
    """
    if any(Path(name, inside).exists() for inside in ("run.json", "metrics.jsonl")):
        raise UserError(
            f"{key} = {name!r}: is a run, not adapters; generate from it, which has base and adapters, "
            f"or `longtake checkpoint export {shlex.quote(name)} adapters --lora peft` and give that folder"
        )
    return find_files(name, key, ((PEFT_CONFIG, _PEFT_FILE), (_PUBLISHED_FILE,)))


@dataclass
class _LayerTensors:
    """Names of the tensors of one layer's adapter."""

    layer: str  # as in the file, without prefixes
    flat: bool
    names: dict[Role, str] = field(default_factory=dict)


def _open(path: str | os.PathLike[str]) -> WeightFiles:
    """Return the file of adapters at a path. Raises `UserError` where there is none, or a folder holds several."""
    path = Path(path).expanduser()
    if path.is_dir():
        known = [path / name for name in (_PEFT_FILE, "adapter_model.bin", _PUBLISHED_FILE) if (path / name).is_file()]
        files = known[:1] or sorted(path.glob("*.safetensors"))
        if len(files) > 1:
            raise UserError(f"{path}: holds {len(files)} files of tensors ({files[0].name} ...); name the one to read")
        path = files[0] if files else path
    files = WeightFiles(path)
    if not files:
        raise UserError(f"{path}: holds no tensors; give a file of adapters")
    return files


def _by_layer(files: WeightFiles) -> dict[str, _LayerTensors]:
    """Return the tensors of each layer of the denoiser, by its flattened name."""
    layers: dict[str, _LayerTensors] = {}
    for name in files:
        if is_of_text_encoder(name):
            continue
        if (parsed := parse_name(name)) is None:
            raise UserError(
                f"{files.path}: the tensor {name} is {other_kind(name)}, expected LoRA or DoRA; give a file of these "
                "alone"
            )
        found = layers.setdefault(flattened(parsed.layer), _LayerTensors(parsed.layer, parsed.flat))
        if parsed.role in found.names:
            raise UserError(
                f"{files.path}: the tensors {found.names[parsed.role]} and {name} adapt the same layer; keep one"
            )
        found.names[parsed.role] = name
    if not layers:
        raise UserError(f"{files.path}: adapts text encoders alone, which stay as they are; give adapters of the model")
    return layers


def _facts(files: WeightFiles) -> AdapterConfig:
    """Return the settings of a file's adapters: those in its header, else PEFT's config if it is of this file."""
    if (header := read_header(files.metadata, str(files.path))) is not None:
        return header
    beside = files.path.parent / PEFT_CONFIG
    is_of_peft = files.path.stem == Path(_PEFT_FILE).stem
    return read_config(beside) if is_of_peft and beside.is_file() else AdapterConfig()


def _adapter(files: WeightFiles, found: _LayerTensors, alpha: float | None, rslora: bool) -> Adapter:
    place, names = str(files.path), found.names
    if not {"a", "b"} <= names.keys():
        raise UserError(
            f"{place}: the adapter of {found.layer} lacks one of its two matrices; export the adapters again"
        )
    a, b = _matrix(files, names["a"]), _matrix(files, names["b"])
    rank = b.shape[1]
    if rank == 0 or a.shape[0] != rank:
        raise UserError(
            f"{place}: the matrices of {found.layer} have ranks {a.shape[0]} and {rank}, expected equal ranks above 0; "
            "export the adapters again"
        )
    if "alpha" in names:
        alpha = _alpha(files, names["alpha"])
    scaling = (rank if alpha is None else alpha) / (rank**0.5 if rslora else rank)
    if scaling > torch.finfo(torch.float32).max:
        raise UserError(f"{place}: alpha of {found.layer} is {alpha:g}, expected less; export the adapters again")
    magnitude = _magnitude(files, names["magnitude"], found.layer, b.shape[0]) if "magnitude" in names else None
    return Adapter(a, b, scaling, magnitude)


def _read(files: WeightFiles, name: str) -> Tensor:
    """Return a tensor of floats, all finite."""
    tensor = files[name]
    if tensor.dtype not in _DTYPES:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise UserError(f"{files.path}: {name} is {kind}, expected bf16, fp16 or fp32; export the adapters again")
    check_finite(tensor, str(files.path), name)
    return tensor


def _matrix(files: WeightFiles, name: str) -> Tensor:
    """Return a matrix; that of a convolution with its channels and kernel as columns."""
    tensor = _read(files, name)
    if tensor.dim() not in (2, 4, 5):
        raise UserError(
            f"{files.path}: {name} has shape {list(tensor.shape)}, expected a matrix; export the adapters again"
        )
    return tensor.flatten(1)


def _alpha(files: WeightFiles, name: str) -> float:
    tensor = files[name]
    if tensor.numel() != 1 or tensor.dim() > 1:
        raise UserError(f"{files.path}: {name} has shape {list(tensor.shape)}, expected one number; export it again")
    is_whole = not (tensor.is_floating_point() or tensor.is_complex()) and tensor.dtype != torch.bool
    return positive_number((tensor if is_whole else _read(files, name)).item(), f"{files.path}: {name}")


def _magnitude(files: WeightFiles, name: str, layer: str, rows: int) -> Tensor:
    magnitude = _read(files, name)
    # of a square layer, columns are as many
    if magnitude.dim() == 0 or magnitude.shape[0] != rows or magnitude.numel() != rows:
        raise UserError(
            f"{files.path}: the magnitude of {layer} has shape {list(magnitude.shape)}, the layer {rows} rows; give a "
            "DoRA adapter that scales rows, one number each"
        )
    return magnitude.flatten()


def _recognised(
    form: Format, layers: Mapping[str, _LayerTensors], config: Any, metadata: Mapping[str, str], place: str
) -> tuple[WeightLayout, dict[str, str]]:
    """Return the layout that knows most of a file's layers, and their names in it; what it does not know keeps its
    name.

    Where several know as many, as of projections alone that are called the same, it is the model's own.
    """
    layouts = [form.own(config), *map(form.as_published, form.namings)]
    if any(found.flat for found in layers.values()):  # written in the naming that the style names, where as good
        layouts = [form.as_published(s.names) for s in form.lora_styles.values() if s.flat and s.names] + layouts
    best, layout = {}, layouts[0]
    for candidate in layouts:
        names = {flattened(layer): layer for layer in layers_of(form, config, candidate)}
        known = {key: names[key] for key in layers if key in names}
        if len(known) > len(best):
            best, layout = known, candidate
    names = {key: best.get(key, found.layer) for key, found in layers.items()}
    return WeightLayout(layout.names, rope_in(metadata, layout.rope, place)), names


def layers_of(form: Format, config: Any, layout: WeightLayout) -> dict[str, tuple[int, ...]]:
    """Return the linear layers of a model of `config` in a layout, with their (out, in)."""
    shapes = {name: tensor.shape for name, tensor in file_tensors(form, config, layout.names).items()}
    return {n.removesuffix(".weight"): s for n, s in shapes.items() if n.endswith(".weight") and len(s) == 2}


def _check_sizes(form: Format, adapters: Adapters, config: Any, layout: WeightLayout, place: str) -> None:
    layers = layers_of(form, config, layout)
    if lost := [layer for layer in adapters if layer not in layers]:
        more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
        raise UserError(
            f"{place}: holds adapters of {', '.join(lost[:3])}{more}, which the model does not have; give adapters of "
            f"the same kind of model ({form.name}), whose options the model section names"
        )
    for layer, adapter in adapters.items():
        found = (adapter.b.shape[0], adapter.a.shape[1])
        if found != layers[layer]:
            raise UserError(
                f"{place}: the adapter of {layer} is for a layer {list(found)}, the model's is {list(layers[layer])}; "
                "make the sizes of the model section those it was trained with"
            )
