"""From a file and flags to a checked configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from pydantic import TypeAdapter, ValidationError

from longtake.config.dump import plain_data
from longtake.config.faults import ConfigError, Fault, shown
from longtake.config.layers import Binding, Layer, open_layers
from longtake.config.overrides import flag_tree, split_flags
from longtake.config.reader import Source, Statement, shown_path
from longtake.config.schema import DEFAULT, fit_keys, forms, underlaid
from longtake.config.section import Section
from longtake.config.translate import translate, truth_faults
from longtake.config.tree import Branch, KeyPath, Leaf, Origin, dotted, grow, leaves, merge, plain

T = TypeVar("T")
GIVEN = "given"  # the place of values that come from no file
TOO_DEEP = "is nested too deeply: too many brackets, or names that depend on each other"


@dataclass(frozen=True)
class Resolved(Generic[T]):
    """A configuration with everything decided."""

    value: T  # the checked schema, defaults filled in
    tree: dict[str, Any]  # what files and flags say, merged, as plain data; no defaults
    origins: dict[str, Origin]  # dotted key of every leaf of `tree` -> where it comes from
    path: Path | None  # the file that was named, None where there was none
    marked: dict[str, Any]  # `tree` with each `_delete_`, as a layer over another file


class Row(NamedTuple):
    """One line of `config show`."""

    key: str  # dotted
    value: Any  # plain data
    origin: str  # `configs/x.py:3`, `--lr`, `configs/x.py:4, from lr (--lr)` or `default`


def load_config(
    path: str | Path,
    overrides: Sequence[str],
    schema: type[T],
    over: Sequence[tuple[str, Mapping[str, Any]]] = (),
    dialect: Dialect | None = None,
) -> Resolved[T]:
    """Read the configuration file at `path` (.py syntax or .toml), lay the flags over it and check it by `schema`.

    `overrides` are command-line words, `["--optim.lr", "1e-4", "--wandb"]`. The file is read as data, never executed.
    `over`: (what messages call it, plain data) of layers between file and flags, the lowest first. `dialect`: the other
    words that all of them may be written in. Raises ConfigError with every fault that was found.
    """
    faults: list[Fault] = []
    path = Path(path)
    try:
        with guarded(shown_path(path), faults):
            layer = open_layers(path, faults.append, None if dialect is None else dialect.find)
    except ConfigError as error:
        faults = error.faults
        split_flags(overrides, faults.append)
        raise ConfigError(faults) from None
    return finish(layer, over, overrides, schema, shown_path(path), path, faults, dialect)


def resolve(
    tree: Mapping[str, Any],
    overrides: Sequence[str],
    schema: type[T],
    place: str = GIVEN,
    over: Sequence[tuple[str, Mapping[str, Any]]] = (),
    dialect: Dialect | None = None,
) -> Resolved[T]:
    """Like `load_config`, with plain data in place of a file; `place` is what messages call it."""
    faults: list[Fault] = []
    layer = Layer(given(tree, place, faults))
    if faults:
        raise ConfigError(faults)
    return finish(layer, over, overrides, schema, place, None, faults, dialect)


def key_names(path: str | Path, dialect: Dialect | None = None) -> frozenset[str]:
    """Return the first words of all keys that a configuration file and its bases assign, to tell what kind of file
    it is; empty for a file that cannot be read, which `load_config` says. `dialect`: knows where bases are."""
    try:
        with guarded(str(path), []):
            layer = open_layers(Path(path), lambda fault: None, None if dialect is None else dialect.find)
    except ConfigError:
        return frozenset()
    return frozenset(name for name in layer.names if not name.startswith("_"))


def given(tree: Mapping[str, Any], place: str, faults: list[Fault]) -> Source:
    """Plain data as the statements of a file that is called `place`; what is no key or no value joins `faults`."""
    source = Source(place)
    for name, value in tree.items():
        try:
            source.statements.append(Statement(name, Origin(place), node=grow(value, Origin(place))))
        except ValueError as error:
            faults.append(Fault(place, "", str(error), key=str(name)))
            source.broken.add(name)
        if not isinstance(name, str) or name.startswith("_"):
            faults.append(Fault(place, shown(name), "is no name of a key", "a key is text and does not start with _"))
    return source


def finish(
    layer: Layer,
    over: Sequence[tuple[str, Mapping[str, Any]]],
    overrides: Sequence[str],
    schema: type[T],
    place: str,
    path: Path | None,
    faults: list[Fault],
    dialect: Dialect | None,
) -> Resolved[T]:
    """Lay `over` and the flags over a layer, bind, merge, translate and check. Raises ConfigError with all faults,
    earlier ones too."""
    for name, tree in over:
        layer = Layer(given(tree, name, faults), bases=[layer])
    before = len(faults)
    flags = flag_tree(split_flags(overrides, faults.append), schema, faults.append)
    flags_are_whole = len(faults) == before
    statements = [Statement(str(name), node.origin, node=node) for name, node in flags.items.items()]
    binding = Binding(Layer(Source(place, statements=statements), bases=[layer]), faults.append)
    with guarded(place, faults):
        found = binding.resolve()
    if dialect is not None:
        found = dialect.translate(found, Heights(layer), faults.append)
    found = fit_keys(found, forms(schema))
    assert isinstance(found, Branch)
    value, refused = check(over_beneath(found, schema, Heights(layer)), schema, place)
    # A name without a value, because it was faulty, would look like a missing key, and fail the checks across keys.
    faults += [fault for fault in refused if not is_consequence(fault, binding.broken, flags_are_whole)]
    if faults:
        raise ConfigError(list(dict.fromkeys(faults)))
    origins = {dotted(keys): node.origin for keys, node in leaves(found)}
    return Resolved(value, plain(found), origins, path, plain(found, marks=True))


@contextmanager
def guarded(place: str, faults: list[Fault]) -> Iterator[None]:
    """Add the `faults` found so far to a ConfigError; one is also raised for what is nested beyond the stack."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError([*faults, *error.faults]) from None
    except (RecursionError, MemoryError):
        raise ConfigError([*faults, Fault(place, "", TOO_DEEP, "write it flatter")]) from None


def over_beneath(tree: Branch, schema: Any, heights: Heights) -> Branch:
    """Return the tree laid over what follows from it by its schema (`Section.beneath`). What stands in it lower down
    than the key that this follows from gives way: `--model.from_pretrained FOLDER` counts upon a preset of another
    model."""
    if not (isinstance(schema, type) and issubclass(schema, Section) and schema.BENEATH):
        return tree
    keys = tuple(schema.BENEATH.split("."))
    if (named := dict(leaves(tree)).get(keys)) is None:
        return tree
    height = heights(named.origin)
    lower = {path for path, node in leaves(tree) if heights(node.origin) < height}
    kind = (*keys[:-1], "type")  # written lower down, it counts if what is named can be of it
    found = schema.beneath(plain(_without(tree, lower - {kind}))) or schema.beneath(plain(_without(tree, lower)))
    beneath = grow(found, Origin(DEFAULT))
    settled = {path for path, _ in leaves(beneath)}
    laid_over = merge(beneath, _without(tree, lower & settled), lambda fault: None)
    assert isinstance(laid_over, Branch)
    return laid_over


def _without(tree: Branch, paths: set[KeyPath], place: KeyPath = ()) -> Branch:
    """Return the tree without the leaves at these paths."""
    items = {}
    for key, node in tree.items.items():
        path = (*place, key)
        if path not in paths:
            items[key] = _without(node, paths, path) if isinstance(node, Branch) else node
    return Branch(items, tree.origin, tree.replaces)


def check(tree: Branch, schema: type[T], place: str) -> tuple[Any, list[Fault]]:
    """Return the schema's value for a tree, and what the schema refuses of it."""
    faults = truth_faults(tree, schema)
    whole = underlaid(tree, forms(schema))
    assert isinstance(whole, Branch)
    known = {fault.key for fault in faults}
    try:
        return TypeAdapter(schema).validate_python(plain(whole)), faults
    except ValidationError as error:
        faults.extend(fault for fault in translate(error, whole, schema, place) if fault.key not in known)
        return None, faults


def is_consequence(fault: Fault, broken: set[str], flags_are_whole: bool) -> bool:
    """Whether a fault may only follow from names that have no value, because they were faulty themselves."""
    if not fault.key:
        return bool(broken) or not flags_are_whole
    return fault.key.split(".")[0] in broken or (fault.rule == "is required" and not flags_are_whole)


def describe(resolved: Resolved[Any]) -> list[Row]:
    """Every value of a configuration, defaults included, with where it comes from; in the order of the schema."""
    node = grow(plain_data(resolved.value), Origin(DEFAULT))
    rows: list[Row] = []
    for path, leaf in leaves(node):
        origin = resolved.origins.get(dotted(path), leaf.origin)
        rows.append(Row(dotted(path), leaf.value if isinstance(leaf, Leaf) else {}, str(origin)))
    return rows


class Heights:
    """The layer that a value was written in, as a number: a base below the file that names it, flags above all."""

    def __init__(self, top: Layer) -> None:
        """`top`: the highest layer below the flags."""
        self._of: dict[str, int] = {}

        def count(layer: Layer) -> None:
            for base in layer.bases:
                count(base)
            self._of[layer.source.file] = len(self._of) + 1

        count(top)

    def __call__(self, origin: Origin) -> int:
        """Return the height of what was written at a place, `file:line` or the name of a layer; of flags beyond all
        layers."""
        place = origin.place
        if place in self._of:
            return self._of[place]
        file, _, line = place.rpartition(":")
        return self._of[file] if line.isdecimal() and file in self._of else len(self._of) + 1

    def is_flag(self, origin: Origin) -> bool:
        return self(origin) > len(self._of)


class Dialect(Protocol):
    """The words of another system, for files, flags and layers alike."""

    def find(self, path: Path) -> Path | None:
        """Where a base is that a file names and that does not exist there; None: nowhere."""
        ...

    def translate(self, tree: Branch, heights: Heights, report: Callable[[Fault], None]) -> Branch:
        """Return the merged tree in the schema's own words; what has no counterpart is reported."""
        ...
