"""Low-rank adapters on linear layers: LoRA (Hu et al. 2021) and DoRA (Liu et al. 2024), over weights that do not train.

LoRA adds (alpha / rank) B A x to W x; A [rank, in] starts uniform, B [out, rank] at zero. DoRA divides the rows of
W + (alpha / rank) B A by their lengths, of which no gradient is taken, and multiplies them by trained magnitudes.

The layers are written out here rather than injected by PEFT: they keep the names of the base's parameters, start by
(seed, name) from the meta device, and can be cut over tensor peers. `weights.lora` reads and writes PEFT's files.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longtake.contracts import UserError
from longtake.models import quantized
from longtake.models.initial import linear_uniform


@dataclass(frozen=True)
class AdapterSize:
    """Rank, scaling and form of one layer's adapter, without its values."""

    rank: int
    scaling: float  # alpha / rank; of rsLoRA alpha / sqrt(rank)
    dora: bool = False
    strength: float = 1.0  # 0: the base layer alone


class FrozenLinear(nn.Linear):
    """A linear layer that takes over the parameters of another and does not train them.

    Quantized, `weight` holds codes and `weight_scale` their scales, of the dtype that the layer had.
    """

    def __init__(self, layer: nn.Linear, kind: quantized.Kind | None = None) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.kind = layer.in_features, layer.out_features, kind
        self.bias = layer.bias
        if kind is None:
            self.weight = layer.weight
        else:
            codes, scale = quantized.empty(layer.weight.detach(), kind)
            self.weight = nn.Parameter(codes, requires_grad=False)
            self.weight_scale = nn.Parameter(scale, requires_grad=False)
        for parameter in self.parameters():
            parameter.requires_grad_(False)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [out, in], or the rows of it that the parameters at hand hold."""
        if self.kind is None:
            return self.weight.to(dtype)
        return quantized.dequantize(self.weight, self.weight_scale, self.kind, dtype)

    def product(self, x: Tensor) -> Tensor:
        """Return x W^T, without the bias."""
        if self.kind is None:
            return F.linear(x, self.weight)
        return quantized.linear(x, self.weight, self.weight_scale, self.kind)

    def held_as(self, kind: str, dense: Tensor) -> dict[str, Tensor]:
        """Return the parameters that hold a dense value of the parameter `kind`: codes and scales where it is
        quantized."""
        if kind != "weight" or self.kind is None:
            return {kind: dense}
        codes, scale = quantized.quantize(dense.to(self.weight.device), self.kind, self.weight_scale.dtype)
        return {"weight": codes, "weight_scale": scale}

    def forward(self, x: Tensor) -> Tensor:
        if self.kind is None:
            return F.linear(x, self.weight, self.bias)
        out = self.product(x)
        return out if self.bias is None else out + self.bias


class LoraLinear(FrozenLinear):
    """A frozen linear layer with an adapter; `lora_a`, `lora_b` and, for DoRA, `magnitude` [out] train."""

    PARAMETERS = "lora_a", "lora_b", "magnitude"  # that it has beside those of a frozen layer

    def __init__(self, layer: nn.Linear, size: AdapterSize, kind: quantized.Kind | None = None) -> None:
        super().__init__(layer, kind)
        device = layer.weight.device
        self.scaling, self.strength = size.scaling, size.strength
        self.lora_a = nn.Parameter(torch.empty(size.rank, self.in_features, device=device))
        self.lora_b = nn.Parameter(torch.empty(self.out_features, size.rank, device=device))
        self.magnitude = nn.Parameter(torch.empty(self.out_features, device=device)) if size.dora else None

    def initial_value(self, name: str, seed: int) -> Tensor:
        """Return the initial values of an adapter parameter: `lora_a` as in linear layers, all else zero.

        DoRA's magnitude follows from the base weight once that is there: `row_lengths`.
        """
        kind = name.rpartition(".")[2]
        shape = self.get_parameter(kind).shape
        return linear_uniform(name, shape, self.in_features, seed) if kind == "lora_a" else torch.zeros(shape)

    def forward(self, x: Tensor) -> Tensor:
        delta = F.linear(self.scaled(F.linear(x, self.lora_a)), self.lora_b)
        if self.magnitude is None:
            return super().forward(x) + delta
        out = self.joined(self.product(x), delta, self.row_factors())
        return out if self.bias is None else out + self.bias

    def scaled(self, low: Tensor) -> Tensor:
        """Return a x times alpha / rank, where that is cheapest; and times the strength where `joined` does not apply
        it."""
        return low * (self.scaling if self.magnitude is not None else self.scaling * self.strength)

    def joined(self, base: Tensor, delta: Tensor, factors: Tensor) -> Tensor:
        """W x, scaled B A x and DoRA's factors of these outputs -> the adapted product, without bias.

        The strength leads in a straight line from the base's output to the adapted one.
        """
        if self.strength == 1:
            return (base + delta) * factors
        return base * (1 + self.strength * (factors - 1)) + delta * (self.strength * factors)

    def row_factors(self) -> Tensor:
        """DoRA's factor of each output [out]: the magnitude over the length of the row of W + scaling B A.

        The square of that length is |w|^2 + 2 scaling b A w + scaling^2 b (A A^T) b^T: W + scaling B A is never made.
        """
        with torch.no_grad():
            a, b = self.lora_a.float() * self.scaling, self.lora_b.float()
            dense = self.dense(self.lora_a.dtype)
            square = torch.linalg.vector_norm(dense, dim=1, dtype=torch.float32).square()
            square += 2 * (F.linear(dense, a.to(dense.dtype)).float() * b).sum(1) + ((b @ (a @ a.T)) * b).sum(1)
            length = square.clamp_(min=torch.finfo(torch.float32).tiny).sqrt_()
        return (self.magnitude.float() / length).to(self.magnitude.dtype)

    def row_lengths(self, rows: Mapping[str, Tensor]) -> Tensor:
        """Lengths of rows of the base weight, float32: where DoRA's magnitudes start.

        `rows`: this layer's parameters by name, all cut to the same rows.
        """
        weight = rows["weight"]
        if self.kind is not None:
            weight = quantized.dequantize(weight, rows["weight_scale"], self.kind, torch.float32)
        return torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32)


def target_layers(
    model: nn.Module,
    targets: Sequence[str] | None,
    usual: Sequence[str] = (),
    names: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> list[str]:
    """Return the linear layers that `lora.targets` names, in the model's order; None: the `usual` ones that there are.

    A target is the name of a layer or of a module that holds layers, or the end of one. `names`: further names of
    layers, those in published files; a layer that joins several of theirs is reached by any. Raises `UserError` for a
    target that names none.
    """
    linear = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    chosen = set()
    for target in usual if targets is None else targets:
        reached = {
            name for name in linear if any(_names_layer(target, known) for known in {name, *names.get(name, ())})
        }
        if targets is not None and not reached:
            ends = sorted({re.sub(r"^[^.]+\.\d+\.", "", name) for name in linear})  # without the numbers of blocks
            raise UserError(f"lora.targets: {target!r} names no linear layer; choose among {', '.join(ends)}")
        chosen |= reached
    return [name for name in linear if name in chosen]


def _names_layer(target: str, name: str) -> bool:
    patterns = [target, f"*.{target}", f"{target}.*"]
    if not target.isdigit():  # a number alone would be every module of a block of that number
        patterns.append(f"*.{target}.*")
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def adapt(model: nn.Module, sizes: Mapping[str, AdapterSize], base: str, dtype: torch.dtype) -> None:
    """Freeze `model` in `dtype`, in place, and add adapters to the layers of `sizes`. Call it on the meta device first.

    `base`: "dense", or how the linear weights of the blocks are stored. Raises `UserError` for a width that has no such
    storage.
    """
    freeze(model, dict.fromkeys(name for name, _ in model.named_parameters()), dtype)
    kind = None if base == "dense" else base
    blocks = tuple(f"{name}." for name in model.blocks)
    for name, layer in list(model.named_modules()):
        if not isinstance(layer, nn.Linear):
            continue
        stored = kind if name.startswith(blocks) else None  # what lies outside the blocks is small, and sets dtypes
        if stored is not None:
            quantized.check_width(stored, name, layer.in_features)
        if name in sizes:
            model.set_submodule(name, LoraLinear(layer, sizes[name], stored))
        elif stored is not None:
            model.set_submodule(name, FrozenLinear(layer, stored))


def freeze(model: nn.Module, names: Mapping[str, object], dtype: torch.dtype) -> None:
    """Parameters of these names do not train any more and are kept in `dtype`, since they need no masters. In place."""
    for name in names:
        layer, _, kind = name.rpartition(".")
        module = model.get_submodule(layer)
        value = module.get_parameter(kind).detach().to(dtype)
        setattr(module, kind, nn.Parameter(value, requires_grad=False))


def frozen_names(model: nn.Module, frozen: Sequence[str], trained: Sequence[str] | None) -> list[str]:
    """Return the parameters that the patterns `freeze` and `train_only` keep from training, in the model's order.

    A pattern is a parameter's or module's name, `*` for anything. Raises `UserError` for one that names nothing, and
    where nothing would train.
    """
    names = [name for name, _ in model.named_parameters()]

    def named(key: str, pattern: str) -> set[str]:
        found = {name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")}
        if not found:
            example = f"{next(iter(model.blocks))}.0"
            raise UserError(f"{key}: {pattern!r} names no parameter; give names such as {example}")
        return found

    out = set().union(*(named("freeze", pattern) for pattern in frozen))
    if trained is not None:
        out |= set(names) - set().union(*(named("train_only", pattern) for pattern in trained))
    if len(out) == len(names):
        raise UserError("freeze, train_only: leave nothing to train; name fewer parameters")
    return [name for name in names if name in out]
