"""Adapter files: ours to those of PEFT, diffusers and Comfy and back, alpha kept; and adapters merged into weights.

| style     | layers                                      | tensors                        | alpha               |
|-----------|---------------------------------------------|--------------------------------|---------------------|
| peft      | our modules, under `base_model.model.`      | lora_A, lora_B                 | adapter_config.json |
| diffusers | diffusers' names, under `transformer.`      | lora_A, lora_B                 | header of the file  |
| comfy     | joined by `_` after `lora_unet_` (kohya)    | lora_down, lora_up, dora_scale | `.alpha` tensors    |

A model's `Format` says which styles it has, and in which naming. Shapes: A [rank, in], B [out, rank], magnitude [out].
The adapted weight is W + (alpha / rank) B A; with a magnitude its rows are brought to that length. As in the weights,
rows of q and k come in two orders of head channels.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longtake.contracts import UserError
from longtake.durable import write_whole
from longtake.hub import find_files
from longtake.small_files import parse_json, read_small
from longtake.weights.conversion import RowRange, cut_rows, file_tensors, plan_conversion
from longtake.weights.files import WeightFiles, save_weights
from longtake.weights.format import AdapterStyle, Format, Rope, WeightLayout, rope_in

CONFIG_HEADER = "lora_adapter_metadata"  # JSON in a file's header, PEFT's config behind the component's name
_PEFT_CONFIG = "adapter_config.json"
_PEFT_FILE = "adapter_model.safetensors"
_PUBLISHED_FILE = "pytorch_lora_weights.safetensors"  # diffusers' name for it
_PEFT_ENDS = {"a": "lora_A.weight", "b": "lora_B.weight", "magnitude": "lora_magnitude_vector"}
_KOHYA_ENDS = {"a": "lora_down.weight", "b": "lora_up.weight", "magnitude": "dora_scale", "alpha": "alpha"}
PEFT = AdapterStyle(_PEFT_ENDS, "base_model.model.", config="file")
DIFFUSERS_STYLE = AdapterStyle(_PEFT_ENDS, "transformer.", config="header")
KOHYA = AdapterStyle(_KOHYA_ENDS, "lora_unet_", flat=True)
PEFT_FILE = AdapterStyle(_PEFT_ENDS | {"alpha": "alpha"}, config="header")  # as PEFT names them, in one file
# What a tensor is, by the end of its name; a number behind it belongs to the layer, of which each part has its own.
_FIELDS = {
    r"lora_A(\.default)?\.weight|lora_down\.weight|matrix_A": "a",
    r"lora_B(\.default)?\.weight|lora_up\.weight|matrix_B": "b",
    r"lora_magnitude_vector((\.default)?\.weight)?|dora_scale": "magnitude",
    r"alpha": "alpha",
}
_PREFIXES = re.compile(r"^(base_model\.model\.|transformer\.|(model\.)?diffusion_model\.)+")


@dataclass(frozen=True)
class Adapter:
    """What is added to one linear layer."""

    a: Tensor
    b: Tensor
    scaling: float  # alpha / rank
    magnitude: Tensor | None = None

    @property
    def rank(self) -> int:
        """Columns of B."""
        return self.b.shape[1]

    @property
    def alpha(self) -> float:
        """The scaling times the rank."""
        return self.scaling * self.rank


Adapters = Mapping[str, Adapter]  # layer name -> adapter


def adapters_of(tensors: Mapping[str, Tensor], scaling: Callable[[str], float] | float) -> dict[str, Adapter]:
    """The adapters in a model's parameters `<layer>.lora_a`, `.lora_b`, `.magnitude`."""
    found = {}
    for name in tensors:
        layer, _, kind = name.rpartition(".")
        if kind == "lora_a":
            scale = scaling if isinstance(scaling, float | int) else scaling(layer)
            found[layer] = Adapter(
                tensors[name], tensors[f"{layer}.lora_b"], float(scale), tensors.get(f"{layer}.magnitude")
            )
    return found


def tensors_of(adapters: Adapters) -> dict[str, Tensor]:
    """The inverse of `adapters_of`."""
    found = {}
    for layer, adapter in adapters.items():
        found |= {f"{layer}.lora_a": adapter.a, f"{layer}.lora_b": adapter.b}
        if adapter.magnitude is not None:
            found[f"{layer}.magnitude"] = adapter.magnitude
    return found


def merged(weight: Tensor, adapter: Adapter) -> Tensor:
    """The weight with its adapter in it, computed in float32, in the weight's dtype."""
    full = weight.float() + adapter.scaling * (adapter.b.float() @ adapter.a.float())
    if adapter.magnitude is not None:
        full *= (adapter.magnitude.float() / torch.linalg.vector_norm(full, dim=1))[:, None]
    return full.to(weight.dtype)


def summed(parts: Sequence[tuple[Adapters, float]]) -> dict[str, Adapter]:
    """Adapters times their strengths, added up: one of all their ranks together, with scaling 1, float32.

    Raises `ValueError` for DoRA among several, whose rows' lengths do not add.
    """
    found: dict[str, Adapter] = {}
    for layer in dict.fromkeys(layer for adapters, _ in parts for layer in adapters):
        terms = [(adapters[layer], strength) for adapters, strength in parts if layer in adapters]
        if any(adapter.magnitude is not None for adapter, _ in terms):
            raise ValueError("DoRA's rows of weights have lengths, which do not add up")
        a = torch.cat([adapter.a.float() for adapter, _ in terms])
        b = torch.cat([adapter.b.float() * (adapter.scaling * strength) for adapter, strength in terms], dim=1)
        found[layer] = Adapter(a, b, 1.0)
    return found


def convert_adapters(
    form: Format, adapters: Adapters, config: Any, source: WeightLayout, target: WeightLayout
) -> dict[str, Adapter]:
    """The same adapters for a model of the same sizes in another layout.

    A projection that is taken apart leaves its A to all parts. Projections that are joined put their adapters side by
    side: the rank is their sum, B holds each one's rows in its own columns, alpha grows with the rank. Raises
    `UserError` where DoRA's magnitudes of a joined projection are not all there, and for a layer in another `Form`.
    """
    if source == target:
        return dict(adapters)
    out = {}
    for name, taken in plan_conversion(form, config, source, target).items():
        layer, _, kind = name.rpartition(".")
        parts = [(rows, adapters.get(rows.tensor.rpartition(".")[0])) for rows in taken]
        if kind != "weight" or not any(adapter for _, adapter in parts):
            continue
        if any(form.namings[names].form_of(n) for names, n in ((source.names, taken[0].tensor), (target.names, name))):
            raise UserError(f"{layer}: lies in such files in another form, which no adapter follows; leave it out")
        out[layer] = _joined(layer, parts, config.head_dim, target.rope)
    return out


def _joined(layer: str, parts: Sequence[tuple[RowRange, Adapter | None]], head_dim: int, target: Rope) -> Adapter:
    """One adapter for these rows of others, one below the other; None: rows that have none."""
    sources = list({id(adapter): adapter for _, adapter in parts if adapter is not None}.values())
    first = sources[0]
    if first.magnitude is not None and any(adapter is None for _, adapter in parts):
        raise UserError(
            f"{layer}: joins layers of which DoRA has adapted only some; export to a style that keeps them apart"
        )
    count, rank = sum(rows.stop - rows.start for rows, _ in parts), sum(source.rank for source in sources)
    b, magnitudes, start = first.b.new_zeros(count, rank), [], 0
    for rows, source in parts:
        stop = start + rows.stop - rows.start
        if source is not None:
            column = sum(other.rank for other in sources[: [id(s) for s in sources].index(id(source))])
            own = cut_rows(rows, source.b, head_dim, target) * (source.scaling / first.scaling)
            b[start:stop, column : column + source.rank] = own
            if source.magnitude is not None:
                magnitudes.append(cut_rows(rows, source.magnitude, head_dim, target))
        start = stop
    a = first.a if len(sources) == 1 else torch.cat([source.a for source in sources])
    return Adapter(a, b, first.scaling, torch.cat(magnitudes) if magnitudes else None)


def save_adapters(
    form: Format, adapters: Adapters, config: Any, path: str | os.PathLike[str], style: str, base: str | None = None
) -> list[Path]:
    """Writes adapters of a model of `config` in one of its format's styles and returns the files written.

    `path`: a folder for a style that keeps its config in a file, a `.safetensors` file for others. `base`: the weights
    they belong to, as PEFT's config names them. Raises `UserError` where something lies there, or a layer has no name
    in the style.
    """
    path, kind, own = Path(path), form.lora_styles[style], form.own(config)
    layout = own if kind.names is None else form.as_published(kind.names)
    converted = convert_adapters(form, adapters, config, own, layout)
    if lacking := [layer for layer in converted if layer in kind.lacks]:
        raise UserError(
            f"{lacking[0]}: {style} has no such layer; leave it out of lora.targets, or export to a style that has it"
        )
    tensors, config_of_peft = _named(converted, kind), peft_config(converted)
    of_kohya = {"ss_network_dim": config_of_peft["r"], "ss_network_alpha": config_of_peft["lora_alpha"]}
    header = {key: str(value) for key, value in of_kohya.items() if "alpha" in kind.ends} | dict(layout.header)
    if kind.config == "header":
        facts = {kind.prefix + key: value for key, value in config_of_peft.items()}
        return save_weights(tensors, path, {CONFIG_HEADER: json.dumps(facts), **header})
    if kind.config is None:
        return save_weights(tensors, path, header)
    if (path / _PEFT_FILE).exists() or path.is_file():
        raise UserError(f"{path}: holds adapters already, which are not overwritten; choose another folder")
    facts = json.dumps({**config_of_peft, "base_model_name_or_path": base}, indent=1) + "\n"
    files = [*save_weights(tensors, path / _PEFT_FILE, layout.header), path / _PEFT_CONFIG]
    write_whole(files[-1], facts)
    return files


def _named(adapters: Adapters, style: AdapterStyle) -> dict[str, Tensor]:
    tensors = {}
    for layer, adapter in adapters.items():
        values = {"a": adapter.a, "b": adapter.b}
        if adapter.magnitude is not None:
            # Comfy reads off the shape [out, 1] that rows are scaled.
            values["magnitude"] = adapter.magnitude[:, None] if style.flat else adapter.magnitude
        if "alpha" in style.ends:
            values["alpha"] = torch.tensor(adapter.alpha)
        start = style.prefix + (layer.replace(".", "_") if style.flat else layer)
        tensors |= {f"{start}.{style.ends[field]}": value for field, value in values.items()}
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
    """The adapters in a file of any style, or in PEFT's folder, for the layers of a model of `config`.

    The style is seen from the names. Alpha comes from tensors, the header or PEFT's config beside the file; else it
    is the rank. Raises `UserError` for tensors that belong to no layer of the model, and for other sizes.
    """
    files = WeightFiles(path)
    place = str(files.path)
    if not files:
        raise UserError(f"{place}: holds no tensors; give a file of adapters")
    fields: dict[str, dict[str, Tensor]] = {}
    for name in files:
        layer, field = _take_apart(name, place)
        fields.setdefault(layer, {})[field] = files[name]
    facts = _facts(files)
    raw = {layer: _adapter(place, layer, found, facts) for layer, found in fields.items()}
    named, layout = _recognised(form, raw, config, files.metadata, place)
    _check(form, named, config, layout, place)
    return convert_adapters(form, named, config, layout, form.own(config))


def find_adapters(name: str, key: str = "lora.from_pretrained") -> Path:
    """The local file or folder that a name of adapters stands for: a path, or a name on the Hugging Face hub.

    `owner/name` is PEFT's folder, or diffusers' file in one. Raises `UserError` as `find_files`, and for
    a run's folder.
    """
    if any(Path(name, inside).exists() for inside in ("run.json", "metrics.jsonl")):
        raise UserError(
            f"{key} = {name!r}: is a run, not adapters; generate from it, which has base and adapters, "
            f"or `longtake checkpoint export {shlex.quote(name)} adapters --lora peft` and give that folder"
        )
    return find_files(name, key, ((_PEFT_CONFIG, _PEFT_FILE), (_PUBLISHED_FILE,)))


def _take_apart(name: str, place: str) -> tuple[str, str]:
    """A tensor's layer, without the style's prefix, and what it is of the adapter."""
    for end, field in _FIELDS.items():
        if found := re.fullmatch(rf"(?P<layer>.+)\.({end})(?P<number>\.\d+)?", name):
            return _PREFIXES.sub("", found["layer"]) + (found["number"] or ""), field
    raise UserError(f"{place}: the tensor {name} is no part of a LoRA or DoRA adapter; give a file of adapters alone")


def _facts(files: WeightFiles) -> dict[str, Any]:
    """PEFT's config of the adapters: from the file beside them or the header; empty where there is none."""
    folder = files.path if files.path.is_dir() else files.path.parent
    try:
        if (beside := folder / _PEFT_CONFIG).is_file():
            return parse_json(read_small(beside))
        header = parse_json(files.metadata.get(CONFIG_HEADER, "{}"))
        alpha = files.metadata.get("ss_network_alpha", "None")  # as kohya writes where there is none
        of_kohya = {} if alpha == "None" else {"lora_alpha": float(alpha)}
        return of_kohya | {_PREFIXES.sub("", key): value for key, value in header.items()}
    except (ValueError, AttributeError):
        raise UserError(
            f"{files.path}: the config of its adapters is no JSON table; export the adapters again"
        ) from None


def _adapter(place: str, layer: str, found: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Adapter:
    if not {"a", "b"} <= found.keys():
        raise UserError(f"{place}: the adapter of {layer} lacks one of its two matrices; export the adapters again")
    rank = found["b"].shape[1]
    if "alpha" in found:
        alpha = float(found["alpha"])
    else:
        alpha = float(_by_pattern(layer, facts.get("alpha_pattern") or {}, facts.get("lora_alpha", rank)))
    scaling = alpha / (rank**0.5 if facts.get("use_rslora") else rank)
    if (magnitude := found.get("magnitude")) is not None:
        rows = found["b"].shape[0]
        if magnitude.shape[0] != rows or magnitude.numel() != rows:  # of a square layer, columns are as many
            raise UserError(
                f"{place}: the magnitude of {layer} has shape {list(magnitude.shape)}, the layer {rows} rows; give a "
                "DoRA adapter that scales rows, one number each"
            )
        magnitude = magnitude.flatten()
    return Adapter(found["a"], found["b"], scaling, magnitude)


def _by_pattern(layer: str, patterns: Mapping[str, Any], default: Any) -> Any:
    """PEFT's exceptions: the value of the first pattern that the layer's name ends with."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", layer)), default)


def _recognised(
    form: Format, raw: Adapters, config: Any, metadata: Mapping[str, str], place: str
) -> tuple[dict[str, Adapter], WeightLayout]:
    """The adapters by the layers of the layout that knows most of them; what it does not know keeps its name.

    Where several know as many, as of projections alone that are called the same, it is the model's own.
    """
    layouts = [form.own(config), *map(form.as_published, form.namings)]
    flat = any(layer.startswith(KOHYA.prefix) for layer in raw)
    if flat:  # written in the naming that the style names, where this is as good as another
        layouts = [form.as_published(s.names) for s in form.lora_styles.values() if s.flat and s.names] + layouts
    best, layout = {}, layouts[0]
    for candidate in layouts:
        layers = layers_of(form, config, candidate)
        keys = {_flattened(layer): layer for layer in layers} if flat else {layer: layer for layer in layers}
        known = {layer: keys[key] for layer in raw if (key := _flattened(layer) if flat else layer) in keys}
        if len(known) > len(best):
            best, layout = known, candidate
    named = {best.get(layer, layer): adapter for layer, adapter in raw.items()}
    return named, WeightLayout(layout.names, rope_in(metadata, layout.rope, place))


def _flattened(layer: str) -> str:
    return layer.removeprefix(KOHYA.prefix).lstrip("_").replace(".", "_")


def layers_of(form: Format, config: Any, layout: WeightLayout) -> dict[str, tuple[int, ...]]:
    """The linear layers of a model of `config` in a layout, with their (out, in)."""
    shapes = {name: tensor.shape for name, tensor in file_tensors(form, config, layout.names).items()}
    return {n.removesuffix(".weight"): s for n, s in shapes.items() if n.endswith(".weight") and len(s) == 2}


def _check(form: Format, adapters: Adapters, config: Any, layout: WeightLayout, place: str) -> None:
    layers = layers_of(form, config, layout)
    if lost := [layer for layer in adapters if layer not in layers]:
        more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
        raise UserError(
            f"{place}: holds adapters of {', '.join(lost[:3])}{more}, which the model does not have; give adapters of "
            f"the same kind of model ({form.name}), whose options the model section names"
        )
    for layer, adapter in adapters.items():
        found = (adapter.b.shape[0], adapter.a.shape[1])
        if found != layers[layer] or adapter.a.shape[0] != adapter.rank:
            raise UserError(
                f"{place}: the adapter of {layer} is for a layer {list(found)}, the model's is {list(layers[layer])}; "
                "make the sizes of the model section those it was trained with"
            )
