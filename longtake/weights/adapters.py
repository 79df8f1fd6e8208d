"""Adapters of linear layers as data: merged into weights, added up, and converted between layouts.

A [rank, in], B [out, rank], magnitude [out]. The adapted weight is W + (alpha / rank) B A; with a magnitude its rows
are brought to that length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longtake.contracts import UserError
from longtake.weights.conversion import RowRange, cut_rows, plan_conversion
from longtake.weights.format import Format, Rope, WeightLayout


@dataclass(frozen=True)
class Adapter:
    """The update of one linear layer."""

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
    """Return the adapters in a model's parameters `<layer>.lora_a`, `.lora_b`, `.magnitude`."""
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
    """Return the inverse of `adapters_of`."""
    found = {}
    for layer, adapter in adapters.items():
        found |= {f"{layer}.lora_a": adapter.a, f"{layer}.lora_b": adapter.b}
        if adapter.magnitude is not None:
            found[f"{layer}.magnitude"] = adapter.magnitude
    return found


def merged(weight: Tensor, adapter: Adapter) -> Tensor:
    """Return the weight with its adapter in it, computed in float32, in the weight's dtype."""
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
    """Return the same adapters for a model of the same sizes in another layout.

    A projection that is taken apart leaves its A to all parts. Projections that are joined put their adapters side by
    side: the rank is their sum, B holds each one's rows in its own columns, alpha grows with the rank. Raises
    `UserError` where DoRA's magnitudes of a joined projection are not all there, and for a layer whose
    `Form` does more than reshape.
    """
    if source == target:
        return dict(adapters)
    out = {}
    for name, taken in plan_conversion(form, config, source, target).items():
        layer, _, kind = name.rpartition(".")
        parts = [(rows, adapters.get(rows.tensor.rpartition(".")[0])) for rows in taken]
        if kind != "weight" or not any(adapter for _, adapter in parts):
            continue
        forms = (form.namings[source.names].form_of(taken[0].tensor), form.namings[target.names].form_of(name))
        if any(kept is not None and not kept.only_reshapes for kept in forms):
            raise UserError(f"{layer}: has another form in such files, which no adapter follows; choose other layers")
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
