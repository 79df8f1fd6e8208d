"""State dicts from one layout into another, tensor by tensor, as a `Format` says."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longtake.contracts import UserError
from longtake.models.build import build_denoiser
from longtake.weights.format import Format, Rope, Shape, WeightLayout, matches


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a file, in the model's form: its shape, and the parts that its rows are, each with its rows."""

    shape: Shape
    parts: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class RowRange:
    """Rows `start:stop` of a tensor; `heads`: the channels of their heads are in the other order."""

    tensor: str
    start: int
    stop: int
    heads: bool = False


def state_shapes(config: Any) -> dict[str, Shape]:
    """Names and shapes of a model's tensors, in the model's order; nothing is allocated."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in build_denoiser(config).state_dict().items()}


def file_tensors(form: Format, config: Any, names: str) -> dict[str, FileTensor]:
    """Every tensor that a file of a naming has for a model of `config`, in the model's order."""
    own, naming = form.namings[form.own(config).names], form.namings[names]
    found: dict[str, dict[int, tuple[str, int]]] = {}
    rest: dict[str, Shape] = {}
    for name, shape in state_shapes(config).items():
        parts = own.parts_of(name)
        for part, rows in zip(parts, _rows_of(form, config, parts, shape[0]), strict=True):
            tensor, place = naming.place_of(part)
            found.setdefault(tensor, {})[place] = (part, rows)
            rest[tensor] = shape[1:]
    ordered = {tensor: tuple(found[tensor][place] for place in sorted(found[tensor])) for tensor in found}
    return {
        tensor: FileTensor((sum(rows for _, rows in parts), *rest[tensor]), parts) for tensor, parts in ordered.items()
    }


def layer_names(form: Format, config: Any) -> dict[str, frozenset[str]]:
    """Return the names of each linear layer of a model: its own, and in published folders those of all layers
    it joins."""
    published = {*form.folders, *form.torch_folders, *(style.names for style in form.lora_styles.values())}
    wanted = published | {form.own(config).names}
    namings = [naming for key, naming in form.namings.items() if key in wanted and naming.signs]
    return {
        name.removesuffix(".weight"): frozenset(
            naming.place_of(part)[0].removesuffix(".weight") for naming in namings for part, _ in tensor.parts
        )
        for name, tensor in file_tensors(form, config, form.own(config).names).items()
        if name.endswith(".weight") and len(tensor.shape) == 2
    }


def _rows_of(form: Format, config: Any, parts: Sequence[str], rows: int) -> list[int]:
    """Return the rows of each part of a tensor: as the format gives them, the others as many each."""
    keys = [next((key for like, key in form.rows.items() if matches(part, [like])), None) for part in parts]
    given = [None if key is None or len(parts) == 1 else getattr(config, key) for key in keys]
    left = rows - sum(count for count in given if count is not None)
    return [left // given.count(None) if count is None else count for count in given]


def plan_conversion(
    form: Format, config: Any, source: WeightLayout, target: WeightLayout
) -> dict[str, tuple[RowRange, ...]]:
    """For each tensor of a model in layout `target`: the rows of tensors of `source` that make it up, in order."""
    located: dict[str, RowRange] = {}
    for name, tensor in file_tensors(form, config, source.names).items():
        start = 0
        for part, count in tensor.parts:
            reordered = source.rope != target.rope and matches(part, form.heads)
            located[part] = RowRange(name, start, start + count, reordered)
            start += count
    plan = {}
    for name, tensor in file_tensors(form, config, target.names).items():
        taken: list[RowRange] = []
        for part, _ in tensor.parts:
            rows, last = located[part], taken[-1] if taken else None
            if last and (last.tensor, last.stop, last.heads) == (rows.tensor, rows.start, rows.heads):
                taken[-1] = RowRange(rows.tensor, last.start, rows.stop, rows.heads)
            else:
                taken.append(rows)
        plan[name] = tuple(taken)
    return plan


def assemble(taken: Sequence[RowRange], read: Callable[[str], Tensor], head_dim: int, target: Rope) -> Tensor:
    """One tensor from rows of others: cut, channels of heads reordered where `heads` is set, and joined."""
    cut = [cut_rows(rows, read(rows.tensor), head_dim, target) for rows in taken]
    return cut[0] if len(cut) == 1 else torch.cat(cut)


def cut_rows(rows: RowRange, whole: Tensor, head_dim: int, target: Rope) -> Tensor:
    """Return these rows of a tensor; the whole itself where they are all of it."""
    part = whole if (rows.start, rows.stop) == (0, whole.shape[0]) else whole[rows.start : rows.stop]
    return reorder_heads(part, head_dim, target) if rows.heads else part


def reorder_heads(x: Tensor, head_dim: int, target: Rope) -> Tensor:
    """Turn the rows [N * K, ...] of a q or k projection, or a norm's scale [K], into the other order of channels.

    new[j] = old[2j] and new[K/2 + j] = old[2j + 1] make interleaved heads half ones that give the same outputs.
    """
    pairs = (head_dim // 2, 2) if target == "half" else (2, head_dim // 2)
    return x.unflatten(0, (-1, *pairs)).transpose(1, 2).flatten(0, 2)


class ConvertedWeights(Mapping[str, Tensor]):
    """The tensors of a model of `config` in another layout, each made when it is asked for: the inverse of
    `ModelWeights`.

    Tensors that are alike in both share the memory of `state`. Raises `UserError` for a state of another config.
    """

    def __init__(self, form: Format, state: Mapping[str, Tensor], config: Any, target: WeightLayout) -> None:
        self._state, self._config, self._target, self._naming = state, config, target, form.namings[target.names]
        self._plan = plan_conversion(form, config, form.own(config), target)
        self._made = {name: make for name, make in self._naming.computed.items() if make is not None}
        used = {rows.tensor for taken in self._plan.values() for rows in taken}
        if faults := differences(sorted(used - set(state)), sorted(set(state) - used)):
            raise UserError(f"the state dict does not fit its model config: {'; '.join(faults)}")

    def __getitem__(self, name: str) -> Tensor:
        if name in self._made:
            return self._made[name](self._config)
        value = assemble(self._plan[name], self._state.__getitem__, self._config.head_dim, self._target.rope)
        kept = self._naming.form_of(name)
        return value if kept is None else kept.write(value, kept.shape(self._config))

    def __iter__(self) -> Iterator[str]:
        return iter({**self._plan, **self._made})

    def __len__(self) -> int:
        return len({**self._plan, **self._made})


def differences(missing: Sequence[str], unknown: Sequence[str]) -> list[str]:
    """Return the tensors that a file lacks, and those that the model does not have, one line each."""
    faults = (("missing", missing), ("unknown", unknown))
    return [f"{what} {enumerated(names)}" for what, names in faults if names]


def enumerated(names: Sequence[str]) -> str:
    """Every name, block numbers of like tensors drawn together: `double_blocks.{0..18}.img_mod.lin.weight`."""
    groups: dict[tuple[str, str], list[int]] = {}
    for name in names:
        found = re.match(r"(.+?\.)(\d+)(\..*|$)", name)
        numbers = groups.setdefault((found[1], found[3]) if found else (name, ""), [])
        numbers += [int(found[2])] if found else []
    return ", ".join(head + (_ranges(numbers) if numbers else "") + tail for (head, tail), numbers in groups.items())


def _ranges(numbers: list[int]) -> str:
    numbers = sorted(numbers)
    if len(numbers) == 1:
        return str(numbers[0])
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{{{numbers[0]}..{numbers[-1]}}}"
    return "{" + ",".join(map(str, numbers)) + "}"
