"""The weights of a model from files of any layout that its format knows."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from longtake.contracts import UserError, WeightsMisfit
from longtake.tensor_files import check_finite
from longtake.weights.conversion import assemble, differences, enumerated, file_tensors, plan_conversion
from longtake.weights.files import TensorSource, open_source
from longtake.weights.format import Format, Growth, Rope, Shape, WeightLayout, matches, rope_in
from longtake.weights.lora_names import FLOAT8, other_kind


def recognise(
    form: Format, names: Collection[str], place: str, metadata: Mapping[str, str]
) -> tuple[WeightLayout, str]:
    """Return the layout of a state dict with these tensor names, and what stands before each; `place` names it in a
    fault.

    Names do not show the order of head channels: files written here say it in their metadata, others are taken to
    follow their naming. Raises `UserError` where no naming has such names.
    """
    for naming_name, naming in form.namings.items():
        for prefix in ("", *naming.prefixes):
            own = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
            seen = [any(matches(name, sign.split("|")) for name in own) for sign in naming.signs]
            if seen and all(seen):
                return WeightLayout(naming_name, rope_in(metadata, naming.rope, place)), prefix
    first = sorted({naming.signs[0] for naming in form.namings.values() if naming.signs})
    raise UserError(f"{place}: holds no {form.name} weights (no tensor {' or '.join(first)}); give {form.sources}")


class ModelWeights(Mapping[str, Tensor]):
    """The tensors of a file under the names of a model of `config`, each made when it is asked for.

    `source`: a safetensors file, a folder of them (see `open_source`), or tensors that are open already. `rope`: the
    file's order of head channels where its naming and metadata do not say. All names and shapes are compared at once,
    before any data is read.

    What a file may hold less of (`Growth`) starts as that says; such tensors that are drawn are not in the mapping.
    `notes` says so, and what was left out, one line each.

    Raises `UserError` naming the tensors that the model lacks (`surplus`) or the file lacks (`missing`); with
    `config.strict_load` False these are noted and kept as attributes instead, and missing ones are not in the mapping.
    A tensor of another size is refused in any case, a mixture of namings too, and whole numbers when they are read.
    """

    def __init__(
        self, source: str | os.PathLike[str] | TensorSource, config: Any, form: Format, rope: Rope | None = None
    ) -> None:
        self.files = open_source(source) if isinstance(source, (str, os.PathLike)) else source
        self.config, self.form = config, form
        place = str(self.files.path)
        found, self._prefix = recognise(form, set(self.files), place, self.files.metadata)
        self.layout = WeightLayout(found.names, rope or found.rope)
        self._naming = form.namings[found.names]
        self._given = file_tensors(form, config, found.names)
        self._names = names = {name.removeprefix(self._prefix) for name in self.files}
        self.notes = [f"{place}: {self._naming.note}"] if self._naming.note else []
        self._check_kind()
        self._grown: dict[str, Growth] = {}  # tensor of the file -> how it becomes what the model needs
        for growth in self._allowed_growths():
            covered = [name for name in self._given if matches(name, growth.tensors)]
            if covered and not growth.dims and not names & set(covered):
                self._grow(growth, covered)
        self.missing = sorted(set(self._given) - names - set(self._grown))
        self.surplus = sorted(n for n in names - set(self._given) if not matches(n, self._naming.computed))
        self._judge_differences()
        self._check_sizes()
        lost = {*self.missing, *(name for name, growth in self._grown.items() if growth.fill is None)}
        plan = plan_conversion(form, config, self.layout, form.own(config))
        self._plan = {name: taken for name, taken in plan.items() if not lost & {rows.tensor for rows in taken}}

    def __getitem__(self, name: str) -> Tensor:
        return assemble(self._plan[name], self._read, self.config.head_dim, self.form.own(self.config).rope)

    def __iter__(self) -> Iterator[str]:
        return iter(self._plan)

    def __len__(self) -> int:
        return len(self._plan)

    @property
    def unread_known(self) -> str | None:
        """Note on the growth that the file lacks and without which the model never read known values; None where it has
        it."""
        return next((growth.note for growth in self._grown.values() if growth.reads_known), None)

    def _read(self, name: str) -> Tensor:
        """Return a tensor of the file in the size and form that the model needs."""
        growth, found = self._grown.get(name), None
        if name in self._names:
            found = self.files[self._prefix + name]
            if not found.is_floating_point():
                kind = str(found.dtype).removeprefix("torch.")
                raise UserError(
                    f"{self.files.path}: {name} is kept as {kind}, which are codes of quantised weights; give the "
                    "weights in bf16 or float32"
                )
            check_finite(found, str(self.files.path), name)
        if growth is not None:
            found = growth.fill(found, self._size_in_file(name))
        form = self._naming.form_of(name)
        return found if form is None else form.read(found, self._given[name].shape)

    def _size_in_file(self, name: str) -> Shape:
        form = self._naming.form_of(name)
        return self._given[name].shape if form is None else form.shape(self.config)

    def _allowed_growths(self) -> list[Growth]:
        return [growth for growth in self._naming.growths if growth.key is None or getattr(self.config, growth.key)]

    def _grow(self, growth: Growth, names: Iterable[str]) -> None:
        self._grown |= dict.fromkeys(names, growth)
        by_key = "" if growth.key is None else f" (model.{growth.key})"
        if (note := f"{self.files.path} has {growth.note}{by_key}") not in self.notes:
            self.notes.append(note)

    def _check_kind(self) -> None:
        """Raise `WeightsMisfit` where the file is of a model of other sizes, by the keys in which they differ."""
        if self.form.sizes_in is None or not self.config.strict_load:
            return
        parts = {part: name for name in self._names for part in self._naming.parts_of(name)}
        found = self.form.sizes_in({part: self.files.shape(self._prefix + name) for part, name in parts.items()})
        if other := {key: value for key, value in found.items() if value != getattr(self.config, key)}:
            own = ", ".join(f"{key} = {getattr(self.config, key)}" for key in other)
            theirs = ", ".join(f"{key} = {value}" for key, value in other.items())
            raise WeightsMisfit(
                f"{self.files.path}: holds a {self.form.name} with {theirs}, "
                f"and the model section has {own}; make the section that of the file, or give other weights"
            )

    def _judge_differences(self) -> None:
        faults = differences(self.missing, self.surplus)
        if not faults:
            return
        if scales := [name for name in self.surplus if other_kind(name) == FLOAT8]:
            raise UserError(
                f"{self.files.path}: holds {FLOAT8} ({enumerated(scales[:1])}), which are not read; give weights in "
                "bf16 or float32"
            )
        for other in self.form.namings:
            if foreign := file_tensors(self.form, self.config, other).keys() & self.surplus:
                raise UserError(
                    f"{self.files.path}: mixes {self.layout.names} tensors with {other} ones "
                    f"({enumerated(sorted(foreign))}); give one or the other"
                )
        what = f"{self.files.path}: does not fit the model: {'; '.join(faults)}"
        if not self.config.strict_load:
            start = "; what is missing starts at random" if self.missing else ""
            self.notes.append(f"{what}; passed over (model.strict_load is False){start}")
            return
        for growth in self._naming.growths:
            if not self.missing and growth.if_unknown and growth.is_all_of(self.surplus):
                raise UserError(f"{what}; {growth.if_unknown}")
            if not self.surplus and growth.if_missing and growth.is_all_of(self.missing):
                raise UserError(f"{what}; {growth.if_missing}")
        raise WeightsMisfit(
            f"{what}; change {self.form.keys} to match, or set model.strict_load to False to go on without"
        )

    def _check_sizes(self) -> None:
        for name in sorted(self._names & set(self._given)):
            found, wanted = tuple(self.files.shape(self._prefix + name)), self._size_in_file(name)
            if found == wanted:
                continue
            allowed = (g for g in self._allowed_growths() if matches(name, g.tensors) and g.allows(found, wanted))
            if (growth := next(allowed, None)) is None:
                raise WeightsMisfit(
                    f"{self.files.path}: {name} has shape {list(found)}, the model needs {list(wanted)}; "
                    "make the sizes of the model section those of the file"
                )
            self._grow(growth, [name])
