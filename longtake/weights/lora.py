"""Adapter files: ours to those of PEFT, diffusers and Comfy and back, alpha kept; and adapters merged into weights.

| family    | layers                                            | tensors                        | alpha               |
|-----------|---------------------------------------------------|--------------------------------|---------------------|
| peft      | our modules, under `base_model.model.`            | lora_A, lora_B                 | adapter_config.json |
| diffusers | FluxTransformer2DModel's, under `transformer.`    | lora_A, lora_B                 | header of the file  |
| comfy     | FLUX's, joined by `_` after `lora_unet_` (kohya)  | lora_down, lora_up, dora_scale | `.alpha` tensors    |

Shapes: A [rank, in], B [out, rank], magnitude [out]. The adapted weight is W + (alpha / rank) B A; with a magnitude its
rows are brought to that length. As in the weights, rows of q and k come in two orders of head channels
(`weights.mmdit`); diffusers and Comfy have them interleaved.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from longtake.contracts import UserError
from longtake.durable import write_whole
from longtake.hub import find_files
from longtake.models import MMDiTConfig
from longtake.weights.files import WeightFiles, save_weights
from longtake.weights.mmdit import plan_conversion, reorder_heads
from longtake.weights.mmdit_names import DIFFUSERS, FLUX, OPEN_SORA_V2, ROPE_KEY, Layout, Rope, file_tensors, layout_of

Family = Literal["peft", "diffusers", "comfy"]

DIFFUSERS_HEADER = "lora_adapter_metadata"  # JSON in a file's header, PEFT's config under the component's name
_PEFT_CONFIG = "adapter_config.json"
_PEFT_FILE = "adapter_model.safetensors"
_DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
_FIELDS = {
    "lora_A.weight": "a",
    "lora_A.default.weight": "a",
    "lora_down.weight": "a",
    "lora_B.weight": "b",
    "lora_B.default.weight": "b",
    "lora_up.weight": "b",
    "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude",
    "lora_magnitude_vector.default.weight": "magnitude",
    "dora_scale": "magnitude",
    "alpha": "alpha",
}
_PREFIXES = ("base_model.model.", "transformer.", "model.diffusion_model.", "diffusion_model.")
_KOHYA = "lora_unet_"


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
    for name, a in tensors.items():
        layer, _, kind = name.rpartition(".")
        if kind == "lora_a":
            scale = scaling if isinstance(scaling, float | int) else scaling(layer)
            found[layer] = Adapter(a, tensors[f"{layer}.lora_b"], float(scale), tensors.get(f"{layer}.magnitude"))
    return found


def tensors_of(adapters: Adapters) -> dict[str, Tensor]:
    """The inverse of `adapters_of`."""
    found = {}
    for layer, adapter in adapters.items():
        found |= {f"{layer}.lora_a": adapter.a, f"{layer}.lora_b": adapter.b}
        if adapter.magnitude is not None:
            found[f"{layer}.magnitude"] = adapter.magnitude
    return found


def merged(weight: Tensor, adapter: Adapter, strength: float = 1.0) -> Tensor:
    """The weight with its adapter in it, computed in float32, in the weight's dtype.

    `strength` leads in a straight line from the weight as it is (0) to the adapted one (1).
    """
    base = weight.float()
    full = base + adapter.scaling * (adapter.b.float() @ adapter.a.float())
    if adapter.magnitude is not None:
        full *= (adapter.magnitude.float() / torch.linalg.vector_norm(full, dim=1))[:, None]
    return torch.lerp(base, full, strength).to(weight.dtype)


def convert_adapters(adapters: Adapters, config: MMDiTConfig, source: Layout, target: Layout) -> dict[str, Adapter]:
    """The same adapters for a model of the same sizes in another layout.

    A projection that is taken apart leaves its A to all parts. Projections that are joined put their adapters side by
    side: the rank is their sum, B holds each one's rows in its own columns, alpha grows with the rank. Raises
    `UserError` where DoRA's magnitudes of a joined projection are not all there.
    """
    given = file_tensors(config, source.names)
    out = {}
    for name, pieces in plan_conversion(config, source, target).items():
        layer, _, kind = name.rpartition(".")
        parts = []
        for piece in pieces:
            start, stop = piece.rows or (0, given[piece.source].shape[0])
            adapter = adapters.get(piece.source.rpartition(".")[0])
            parts.append(_Part(adapter, slice(start, stop), piece.heads))
        if kind == "weight" and any(part.adapter for part in parts):
            out[layer] = _joined(layer, parts, config.head_dim, target.rope)
    return out


@dataclass(frozen=True)
class _Part:
    """Rows of an adapter, or as many rows without one; `heads`: of q or k, in the other order of channels."""

    adapter: Adapter | None
    rows: slice
    heads: bool

    def take(self, whole: Tensor, head_dim: int, target: Rope) -> Tensor:
        """These rows, channels of heads in the order of `target`."""
        return reorder_heads(whole[self.rows], head_dim, target) if self.heads else whole[self.rows]


def _joined(layer: str, parts: Sequence[_Part], head_dim: int, target: Rope) -> Adapter:
    """One adapter for the rows of these parts, one below the other."""
    sources = list({id(part.adapter): part.adapter for part in parts if part.adapter is not None}.values())
    first = sources[0]
    if first.magnitude is not None and any(part.adapter is None for part in parts):
        raise UserError(
            f"{layer}: joins layers of which DoRA has adapted only some; export to a family that keeps them apart, as "
            "diffusers does"
        )
    rows, rank = sum(part.rows.stop - part.rows.start for part in parts), sum(source.rank for source in sources)
    b, magnitudes, start = first.b.new_zeros(rows, rank), [], 0
    for part in parts:
        stop = start + part.rows.stop - part.rows.start
        if (source := part.adapter) is not None:
            column = sum(other.rank for other in sources[: [id(s) for s in sources].index(id(source))])
            own = part.take(source.b, head_dim, target) * (source.scaling / first.scaling)
            b[start:stop, column : column + source.rank] = own
            if source.magnitude is not None:
                magnitudes.append(part.take(source.magnitude, head_dim, target))
        start = stop
    a = first.a if len(sources) == 1 else torch.cat([source.a for source in sources])
    return Adapter(a, b, first.scaling, torch.cat(magnitudes) if magnitudes else None)


def save_adapters(
    adapters: Adapters, config: MMDiTConfig, path: str | os.PathLike[str], family: Family, base: str | None = None
) -> list[Path]:
    """Writes adapters of a model of `config` as a family's file and returns the files written.

    `path`: a folder for peft, a `.safetensors` file for the others. `base`: the weights they belong to, as PEFT's
    config names them. Raises `UserError` where something lies there, or a layer has no name in the family.
    """
    path = Path(path)
    if family == "peft":
        if (path / _PEFT_FILE).exists() or path.is_file():
            raise UserError(f"{path}: holds adapters already, which are not overwritten; choose another folder")
        tensors = {f"base_model.model.{name}": tensor for name, tensor in _named(adapters, _PEFT_NAMES).items()}
        facts = json.dumps({**peft_config(adapters), "base_model_name_or_path": base}, indent=1) + "\n"
        path.mkdir(parents=True, exist_ok=True)
        files = save_weights(tensors, path / _PEFT_FILE, {ROPE_KEY: layout_of(config).rope})
        write_whole(path / _PEFT_CONFIG, facts)
        return [*files, path / _PEFT_CONFIG]
    target = DIFFUSERS if family == "diffusers" else FLUX
    converted = convert_adapters(adapters, config, layout_of(config), target)
    if "cond_in" in converted:
        raise UserError(
            f"cond_in: {family} has no such layer in its FLUX; leave it out of lora.targets, or export to peft"
        )
    if family == "comfy":
        named = {_KOHYA + layer.replace(".", "_"): adapter for layer, adapter in converted.items()}
        return save_weights(_named(named, _COMFY_NAMES), path, {ROPE_KEY: target.rope})
    tensors = {f"transformer.{name}": tensor for name, tensor in _named(converted, _PEFT_NAMES).items()}
    header = {f"transformer.{key}": value for key, value in peft_config(converted).items()}
    return save_weights(tensors, path, {DIFFUSERS_HEADER: json.dumps(header), ROPE_KEY: target.rope})


_PEFT_NAMES = {"a": "lora_A.weight", "b": "lora_B.weight", "magnitude": "lora_magnitude_vector"}
_COMFY_NAMES = {"a": "lora_down.weight", "b": "lora_up.weight", "magnitude": "dora_scale", "alpha": "alpha"}


def _named(adapters: Adapters, names: Mapping[str, str]) -> dict[str, Tensor]:
    tensors = {}
    for layer, adapter in adapters.items():
        tensors |= {f"{layer}.{names['a']}": adapter.a, f"{layer}.{names['b']}": adapter.b}
        column = "alpha" in names  # Comfy reads off the shape [out, 1] that rows are scaled
        if adapter.magnitude is not None:
            tensors[f"{layer}.{names['magnitude']}"] = adapter.magnitude[:, None] if column else adapter.magnitude
        if column:
            tensors[f"{layer}.{names['alpha']}"] = torch.tensor(adapter.alpha)
    return tensors


def peft_config(adapters: Adapters) -> dict[str, Any]:
    """What PEFT's `LoraConfig` must be told to rebuild these adapters: the commonest rank and alpha, and exceptions."""
    ranks = {layer: adapter.rank for layer, adapter in adapters.items()}
    alphas = {layer: adapter.alpha for layer, adapter in adapters.items()}
    rank, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "rank_pattern": {layer: value for layer, value in ranks.items() if value != rank},
        "alpha_pattern": {layer: value for layer, value in alphas.items() if value != alpha},
        "target_modules": sorted(adapters),
        "use_dora": any(adapter.magnitude is not None for adapter in adapters.values()),
        "lora_dropout": 0.0,
        "bias": "none",
    }


def read_adapters(path: str | os.PathLike[str], config: MMDiTConfig) -> dict[str, Adapter]:
    """The adapters in a file of any family, or in PEFT's folder, for the layers of a model of `config`.

    The family is seen from the names. Alpha comes from tensors, the header or PEFT's config beside the file; where none
    is told it is the rank. Raises `UserError` for tensors that belong to no layer of the model, and for other sizes.
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
    named, layout = _recognised(raw, config, files.metadata, place)
    _check(named, config, layout, place)
    return convert_adapters(named, config, layout, layout_of(config))


def find_adapters(name: str) -> Path:
    """The local file or folder that `lora.from_pretrained` stands for: a path, or a name on the Hugging Face hub.

    `owner/name` is PEFT's folder, or diffusers' file in one. Raises `UserError` as `find_files`.
    """
    return find_files(name, "lora.from_pretrained", ((_PEFT_CONFIG, _PEFT_FILE), (_DIFFUSERS_FILE,)))


def _take_apart(name: str, place: str) -> tuple[str, str]:
    """A tensor's layer, without the family's prefix, and what it is of the adapter."""
    for suffix, field in _FIELDS.items():
        if name.endswith(f".{suffix}"):
            layer = name.removesuffix(f".{suffix}")
            for prefix in _PREFIXES:
                layer = layer.removeprefix(prefix)
            return layer, field
    raise UserError(f"{place}: the tensor {name} is no part of a LoRA or DoRA adapter; give a file of adapters alone")


def _facts(files: WeightFiles) -> dict[str, Any]:
    """PEFT's config of the adapters: from the file beside them or the header; empty where there is none."""
    folder = files.path if files.path.is_dir() else files.path.parent
    try:
        if (beside := folder / _PEFT_CONFIG).is_file():
            return json.loads(beside.read_text(encoding="utf-8"))
        header = json.loads(files.metadata.get(DIFFUSERS_HEADER, "{}"))
        return {key.removeprefix("transformer."): value for key, value in header.items()}
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
    magnitude = found.get("magnitude")
    return Adapter(found["a"], found["b"], scaling, None if magnitude is None else magnitude.flatten())


def _by_pattern(layer: str, patterns: Mapping[str, Any], default: Any) -> Any:
    """PEFT's exceptions: the value of the first pattern that the layer's name ends with."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", layer)), default)


def _recognised(
    raw: Adapters, config: MMDiTConfig, metadata: Mapping[str, str], place: str
) -> tuple[dict[str, Adapter], Layout]:
    """The adapters by the layers of the layout that they are in; layers that no layout has keep their names."""
    if any(layer.startswith(_KOHYA) for layer in raw):
        flat = {_KOHYA + layer.replace(".", "_"): layer for layer in layers_of(config, FLUX)}
        named, layout = {flat.get(layer, layer): adapter for layer, adapter in raw.items()}, FLUX
    else:  # the first family that knows every layer; in some of them, projections alone tell
        named = dict(raw)
        order = [layout_of(config), OPEN_SORA_V2, FLUX, DIFFUSERS]
        layout = max(order, key=lambda layout: len(named.keys() & layers_of(config, layout).keys()))
    rope = metadata.get(ROPE_KEY, layout.rope)
    if rope not in ("half", "interleaved"):
        raise UserError(f"{place}: its metadata says {ROPE_KEY} = {rope!r}; it must be half or interleaved")
    return named, replace(layout, rope=rope)


def layers_of(config: MMDiTConfig, layout: Layout) -> dict[str, tuple[int, ...]]:
    """The linear layers of a model of `config` in a layout, with their (out, in)."""
    shapes = {name: rows.shape for name, rows in file_tensors(config, layout.names).items()}
    return {n.removesuffix(".weight"): s for n, s in shapes.items() if n.endswith(".weight") and len(s) == 2}


def _check(adapters: Adapters, config: MMDiTConfig, layout: Layout, place: str) -> None:
    layers = layers_of(config, layout)
    if lost := [layer for layer in adapters if layer not in layers]:
        raise _unknown(place, lost)
    for layer, adapter in adapters.items():
        found = (adapter.b.shape[0], adapter.a.shape[1])
        if found != layers[layer] or adapter.a.shape[0] != adapter.rank:
            raise UserError(
                f"{place}: the adapter of {layer} is for a layer {list(found)}, the model's is {list(layers[layer])}; "
                "make the sizes of the model section those it was trained with"
            )


def _unknown(place: str, layers: Sequence[str]) -> UserError:
    more = f" and {len(layers) - 3} more" if len(layers) > 3 else ""
    return UserError(
        f"{place}: holds adapters of {', '.join(layers[:3])}{more}, which the model does not have; give adapters of an "
        "MMDiT (FLUX, Open-Sora 2.0) whose options the model section names"
    )
