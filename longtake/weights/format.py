"""File format of the weights of a kind of denoiser: the record that each family fills, nearly all of it data.

A *naming* is one way of calling a model's tensors. Where one naming joins what another keeps apart (q, k and v in one
projection), both are described by *parts*: runs of rows that every naming keeps together. A naming is a table from the
beginnings of its tensors' names to the parts that their rows are; in either, `*` is the number of a block. What a table
does not name is called the same everywhere. Linear weights are [out, in].

What else may differ between a file and the model is data too: another order of the channels in heads (`heads`),
another form (`Form`), less than the model needs (`Growth`), and tensors that the model makes itself (`computed`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import filter as fnfilter
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from longtake.contracts import UserError

Shape = tuple[int, ...]
Rope = Literal["half", "interleaved"]
ROPE_KEY = "longtake.rope"  # metadata entry of files written here
STEM_OF_DIFFUSERS = "diffusion_pytorch_model"


@dataclass(frozen=True)
class WeightLayout:
    """Layout of a state dict in files: its naming, and the order of channels in the heads of q and k.

    A rotary embedding turns channels (2j, 2j + 1) of `interleaved` heads, (j, K/2 + j) of `half` ones.
    """

    names: str
    rope: Rope = "interleaved"

    @property
    def header(self) -> dict[str, str]:
        """Metadata that files have, for the facts that tensor names do not show."""
        return {ROPE_KEY: self.rope}


@dataclass(frozen=True)
class Form:
    """A tensor that files keep in another form than the model: reshaped, rows in another order, scaled."""

    shape: Callable[[Any], Shape]  # model section -> its shape in the file
    read: Callable[[Tensor, Shape], Tensor] = Tensor.reshape  # the file's tensor, the model's shape
    write: Callable[[Tensor, Shape], Tensor] = Tensor.reshape  # the model's tensor, the file's shape

    @property
    def only_reshapes(self) -> bool:
        """True where rows are the same in files, and columns in the same order."""
        return self.read is Tensor.reshape and self.write is Tensor.reshape


def zeros_beyond(given: Tensor | None, shape: Shape) -> Tensor:
    """Return the given tensor padded with zeros along every dim that needs more."""
    if given is None:
        return torch.zeros(shape)
    whole = given.new_zeros(shape)
    whole[tuple(map(slice, given.shape))] = given
    return whole


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a name matches one of the patterns, in which `*` is anything."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@dataclass(frozen=True)
class Growth:
    """Tensors of which a file may hold less than the model needs: no such tensor, or too little along some dims."""

    tensors: tuple[str, ...]  # patterns of their names in the file
    note: str  # how the model starts then: what stands behind "FILE has"
    fill: Callable[[Tensor | None, Shape], Tensor] | None = zeros_beyond  # None: drawn, as in a model without a file
    dims: tuple[int, ...] = ()  # (): all tensors are absent; else each is there, and may be smaller along these
    cut: bool = False  # or larger
    key: str | None = None  # key of the model section that must be True; None: every file of the naming may
    reads_known: bool = False  # by them alone the model sees what is known of a sample
    if_missing: str = ""  # what to do, for messages, where a file has none of them and may not
    if_unknown: str = ""  # and where a file has them and the model does not

    def is_all_of(self, names: Collection[str]) -> bool:
        """Return whether these are the tensors, and no others."""
        return all(matches(n, self.tensors) for n in names) and all(fnfilter(names, like) for like in self.tensors)

    def allows(self, found: Shape, wanted: Shape) -> bool:
        """Return whether a tensor of the shape found can be made one of the shape wanted."""
        other = {i for i, (one, two) in enumerate(zip(found, wanted, strict=False)) if one != two}
        smaller = self.cut or all(found[i] < wanted[i] for i in other)
        return len(found) == len(wanted) and other <= set(self.dims) and smaller


@dataclass(frozen=True)
class Naming:
    """One way in which files name the tensors of a kind of model."""

    layers: Mapping[str, str | tuple[str, ...]]  # beginning of a name -> of the parts that the rows are, in order
    signs: tuple[str, ...]  # patterns (`a|b`: either) of names, all of which a file has; (): of adapters alone
    rope: Rope = "interleaved"  # of files that do not say
    prefixes: tuple[str, ...] = ()  # what may stand before every name
    forms: Mapping[str, Form] = field(default_factory=dict)  # by the file's names
    growths: tuple[Growth, ...] = ()
    computed: Mapping[str, Callable[[Any], Tensor] | None] = field(default_factory=dict)
    # ^ tensors (patterns) of such files that the model makes itself: passed over when read; written where there is how
    note: str | None = None  # what a user of such a file should know, in one sentence

    def parts_of(self, name: str) -> tuple[str, ...]:
        """Return the parts that the rows of a tensor are, in order."""
        if (found := _look_up(self.layers, name)) is None:
            return (name,)
        return tuple(found.named(part) for part in _several(found.entry))

    def place_of(self, part: str) -> tuple[str, int]:
        """Return the tensor that a part lies in, and which of its parts it is."""
        if (found := _look_up(self._places, part)) is None:
            return part, 0
        tensor, place = found.entry
        return found.named(tensor), place

    def form_of(self, name: str) -> Form | None:
        """Return the form in which a tensor lies in files, where that is not the model's."""
        found = _look_up(self.forms, name)
        return found.entry if found else None

    @cached_property
    def _places(self) -> dict[str, tuple[str, int]]:
        return {part: (name, i) for name, parts in self.layers.items() for i, part in enumerate(_several(parts))}


@dataclass(frozen=True)
class AdapterStyle:
    """Format of adapter files: their layers are those of a naming, after a prefix."""

    ends: Mapping[str, str]  # `a`, `b`, `magnitude`, and `alpha` where it is a tensor -> ends of names
    prefix: str = ""
    flat: bool = False  # dots in a layer's name are underscores
    config: Literal["file", "header"] | None = None  # where PEFT's config of the adapters is; "file": in a folder
    folds_alpha: bool = False  # alpha / rank is multiplied into B: alpha is the rank
    names: str | None = None  # the naming; None: the model's own
    lacks: tuple[str, ...] = ()  # layers of the naming that such files cannot hold


@dataclass(frozen=True)
class Format:
    """Everything that is to be known of the weights of a kind of denoiser: its files', and its adapters'."""

    name: str  # of the kind of model, in messages
    sources: str  # files that can be read, in messages
    namings: Mapping[str, Naming]  # the first one whose signs a file has is its naming
    own: Callable[[Any], WeightLayout]  # model section -> how such a model's own tensors are called and ordered
    keys: str  # keys of the model section that decide which tensors there are, in messages
    heads: tuple[str, ...] = ()  # patterns of parts whose rows are channels of heads that a rotation turns
    rows: Mapping[str, str] = field(default_factory=dict)  # pattern of parts -> property of the section: their rows
    # ^ the other parts of a tensor have as many each
    # Shapes of a file's tensors by our names -> keys of the model section that they show, to be compared with it first.
    sizes_in: Callable[[Mapping[str, Shape]], Mapping[str, Any]] | None = None
    # Naming -> what the `config.json` of such a folder, as other programs read it, says of a model section.
    folders: Mapping[str, Callable[[Any], Mapping[str, Any]]] = field(default_factory=dict)
    stem: str = STEM_OF_DIFFUSERS  # of the names of the files in it
    # Folders of a whole published model, any of which may hold the denoiser for high noise.
    inner: tuple[str, ...] = ()
    # Naming -> what stands before the names in a folder of PyTorch's distributed checkpoint.
    torch_folders: Mapping[str, str] = field(default_factory=dict)
    lora_targets: tuple[str, ...] = ()  # layers (patterns) that get adapters by default
    lora_styles: Mapping[str, AdapterStyle] = field(default_factory=dict)
    # "module:name" of what builds a library's denoiser of the same weights (`references`); None: no library has one.
    reference: str | None = None

    def folder_in(self, path: Path) -> Path:
        """Return the folder of the denoiser, or of the one for high noise, in that of a whole model; any other path
        as it is."""
        return next((path / name for name in self.inner if (path / name).is_dir()), path)

    def as_published(self, names: str) -> WeightLayout:
        """Return the layout of a file of a naming that says no more."""
        return WeightLayout(names, self.namings[names].rope)


def rope_in(metadata: Mapping[str, str], default: Rope, place: str) -> Rope:
    """Return the order of head channels that a file's metadata names. Raises `UserError` where it names no order."""
    rope = metadata.get(ROPE_KEY, default)
    if rope not in ("half", "interleaved"):
        raise UserError(f"{place}: its metadata says {ROPE_KEY} = {rope!r}; it must be half or interleaved")
    return rope  # type: ignore[return-value]


@dataclass(frozen=True)
class _TableMatch:
    """An entry of a table, with the number that its `*` stands for and the rest of the name after it."""

    entry: Any
    number: str
    rest: list[str]

    def named(self, like: str) -> str:
        """Return a pattern of the table as a name."""
        return ".".join([like.replace("*", self.number), *self.rest])


def _look_up(table: Mapping[str, Any], name: str) -> _TableMatch | None:
    """Return the entry for the longest beginning of a name; in the table `*` stands for the first number in it."""
    words = name.split(".")
    place = next((i for i, word in enumerate(words) if word.isdigit()), len(words))
    starred = [*words[:place], "*", *words[place + 1 :]]
    for end in range(len(words), 0, -1):
        for key in (".".join(words[:end]), ".".join(starred[:end])):
            if key in table:
                return _TableMatch(table[key], "".join(words[place : place + 1]), words[end:])
    return None


def _several(parts: str | tuple[str, ...]) -> tuple[str, ...]:
    return (parts,) if isinstance(parts, str) else parts
