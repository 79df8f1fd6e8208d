"""Files upon files: inheritance, late binding, and the one tree that comes out.

A configuration is a stack of layers: the bases a file names, the file, a file that names it as base, at the top the
flags. Two rules give every value.

1. *The value of a key* is what the layers make of it, from the lowest up: a layer contributes its last assignment to
   the name, and `tree.merge` lays it over what is below.
2. *The value of a name in an expression* is decided as late as possible. If a layer above the expression's own assigns
   the name, it is the final value of that key. Otherwise it is what Python would take: the latest assignment above
   the expression in its file, laid over the bases. Only a statement that uses the very name it assigns looks below
   itself in every case: `lr = lr * 2` doubles what was there.

So a child or a flag that changes `lr` changes all that its bases derived from it, and a file means by itself what it
would mean as Python. A name that depends on itself through other names is a fault that shows the way round.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from longtake.config.evaluator import Evaluator, Stop
from longtake.config.faults import ConfigError, Fault
from longtake.config.reader import BASE, Source, Statement, read_source, shown_path
from longtake.config.tree import Branch, Node, Origin, merge, settled
from longtake.presets import find_preset, published_preset

Report = Callable[[Fault], None]
Find = Callable[[Path], Path | None]  # where a base that does not exist is in its stead; None: nowhere


@dataclass(eq=False)
class Layer:
    """One file, or the flags, with the layers below it."""

    source: Source
    bases: list[Layer] = field(default_factory=list)
    child: Layer | None = None  # the layer that names this one as its base
    places: dict[str, list[int]] = field(default_factory=dict)  # name -> its statements in `source`, in order
    names: dict[str, None] = field(default_factory=dict)  # all names of this layer and below, in order

    def __post_init__(self) -> None:
        for index, statement in enumerate(self.source.statements):
            self.places.setdefault(statement.name, []).append(index)
        for base in self.bases:
            base.child = self
            self.names.update(base.names)
        self.names.update(dict.fromkeys(self.places))

    def origin_of(self, name: str) -> Origin:
        """Where this layer or a base of it assigns `name` last."""
        if name in self.places:
            return self.source.statements[self.places[name][-1]].origin
        return next(base.origin_of(name) for base in self.bases if name in base.names)


def open_layers(path: Path, report: Report, find: Find | None = None, chain: tuple[Path, ...] = ()) -> Layer:
    """Read a file and, recursively, its bases. Raises ConfigError, with every reason, where one cannot be read; reports
    a name that two bases assign, since neither is above the other."""
    source = read_source(path, report)
    bases: list[Layer] = []
    faults: list[Fault] = []
    for name in source.bases:
        try:
            base = base_path(path, name, source, chain, find)
            bases.append(open_layers(base, report, find, (*chain, path)))
        except ConfigError as error:
            faults += error.faults
    if faults:
        raise ConfigError(faults)
    owners: dict[str, Layer] = {}
    for base in bases:
        for name in base.names:
            first = owners.setdefault(name, base)
            if first is not base:
                rule = f"is assigned by two bases of {source.file}, here and at {first.origin_of(name).place}"
                report(Fault(base.origin_of(name).place, "", rule, "keep it in one of them, or rename one", name))
                source.broken.add(name)
    return Layer(source, bases)


def base_path(path: Path, name: str, source: Source, chain: tuple[Path, ...], find: Find | None) -> Path:
    """Where a base of the file at `path` is. Raises ConfigError where it is not."""
    base, rule, fix = path.parent / name, "", ""
    try:
        if find is not None and not base.exists():
            base = find(base) or base
        if not base.is_file():
            base = find_preset(name) or published_preset(base) or base
        links = [*chain, path, base]
        files = [link.resolve() for link in links]
        if files[-1] in files[:-1]:
            circle = " -> ".join(map(shown_path, links[files.index(files[-1]) :]))
            rule, fix = f"is a base of itself: {circle}", f"take one {BASE} of this circle out"
        elif not base.exists():
            rule = f"names the base {shown_path(base)}, which does not exist"
            fix = "a base is named relative to the file that names it, or is a preset"
    except (OSError, ValueError, RuntimeError) as error:  # a name too long, a null byte, a loop of links
        rule, fix = f"is no path ({error})", "name a file relative to this one"
    if rule:
        assert source.bases_origin is not None, "a source that names a base says where"
        raise ConfigError([Fault(source.bases_origin.place, f"{BASE} {name!r}", rule, fix)])
    return base


class Binding:
    """Finds the values of a stack of layers by the two rules above."""

    def __init__(self, top: Layer, report: Report) -> None:
        self.top = top
        self.report = report
        self.merged: dict[tuple[Layer, str, int | None], Node] = {}
        self.evaluated: dict[tuple[Layer, int], Node | None] = {}  # None: faulty, and reported
        self.settled: dict[int, tuple[Branch, Node]] = {}  # by the id of the first of the pair, which is kept alive
        self.running: list[tuple[Layer, int]] = []  # statements whose evaluation has begun, for cycles
        self.broken: set[str] = set()  # names without a trustworthy value

    def resolve(self) -> Branch:
        """Return the merged tree of all keys; names that start with _ are no keys. Faulty ones are left out (see
        `broken`)."""
        self.evaluate_all(self.top)
        items: dict[str | int, Node] = {}
        for name in self.top.names:
            if name.startswith("_") or name in self.broken:
                continue
            try:
                node = self.value(self.top, name, None)
            except Stop:
                continue
            if node is not None and name not in self.broken:
                items[name] = node
        return Branch(items, Origin(self.top.source.file))

    def evaluate_all(self, layer: Layer) -> None:
        """Evaluate every statement, from the lowest layer up, so that all faults are found."""
        for base in layer.bases:
            self.evaluate_all(base)
        self.broken |= layer.source.broken
        for index in range(len(layer.source.statements)):
            try:
                self.statement(layer, index)
            except Stop:
                self.broken.add(layer.source.statements[index].name)

    def value(self, layer: Layer, name: str, before: int | None) -> Node | None:
        """What `layer` and its bases make of `name`, by the assignments before statement `before` (None: all); None
        where nobody assigns it. Raises Stop where it is faulty."""
        places = layer.places.get(name, [])
        count = len(places) if before is None else bisect_left(places, before)
        last = places[count - 1] if count else None
        if (layer, name, last) in self.merged:
            return self.merged[layer, name, last]
        if name in layer.source.broken:
            raise Stop
        below = next((self.value(base, name, None) for base in layer.bases if name in base.names), None)
        if last is None:
            return below
        above = self.statement(layer, last)
        node = merge(below, above, lambda fault: self.refuse(name, fault), (name,))
        self.merged[layer, name, last] = node
        return node

    def refuse(self, name: str, fault: Fault) -> None:
        self.report(fault)
        self.broken.add(name)

    def statement(self, layer: Layer, index: int) -> Node:
        """Return the value of one assignment by itself. Raises Stop where it is faulty."""
        place = (layer, index)
        statement = layer.source.statements[index]
        if statement.node is not None:
            return statement.node
        if place not in self.evaluated:
            if place in self.running:
                self.report_cycle(self.running[self.running.index(place) :])
                raise Stop
            assert statement.expr is not None, "a statement has a value or an expression"
            self.running.append(place)
            try:
                self.evaluated[place] = self.evaluator(layer, index).statement(statement.expr)
            except Stop:
                self.evaluated[place] = None
            finally:
                self.running.pop()
        node = self.evaluated[place]
        if node is None:
            raise Stop
        return node

    def evaluator(self, layer: Layer, index: int) -> Evaluator:
        source = layer.source

        def known() -> Iterable[str]:
            above = (statement.name for statement in source.statements[:index])
            return {*above, *(name for base in layer.bases for name in base.names)}

        lookup = partial(self.reference, layer, index)
        return Evaluator(source.file, source.lines, lookup, known, self.report)

    def reference(self, layer: Layer, index: int, name: str) -> Node | None:
        """Return the value of a name in the expression of statement `index`. None where it is not defined there."""
        above = name in layer.places and layer.places[name][0] < index
        if not above and not any(name in base.names for base in layer.bases):
            if name in layer.source.broken:
                raise Stop
            return None
        if name != layer.source.statements[index].name and self.is_overridden(layer, name):
            node = self.value(self.top, name, None)
        else:
            node = self.value(layer, name, index)
        if not isinstance(node, Branch):
            return node
        if id(node) not in self.settled:  # once for each value, however often it is referred to
            self.settled[id(node)] = (node, settled(node))
        return self.settled[id(node)][1]

    def is_overridden(self, layer: Layer, name: str) -> bool:
        """Whether a layer above this one assigns `name`."""
        return layer.child is not None and (name in layer.child.places or self.is_overridden(layer.child, name))

    def report_cycle(self, circle: list[tuple[Layer, int]]) -> None:
        statements: list[Statement] = [layer.source.statements[index] for layer, index in circle]
        first = statements[0]
        links = " -> ".join(f"{statement.name} ({statement.origin.place})" for statement in [*statements, first])
        fix = "write one of these values without the others"
        self.report(Fault(first.origin.place, "", f"depends on itself: {links}", fix, first.name))
        self.broken.update(statement.name for statement in statements)
