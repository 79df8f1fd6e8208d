"""A configuration before its schema is applied: a tree of values that remember where they were written."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from longtake.config.faults import Fault, quote, shown

Key = str | int
KeyPath = tuple[Key, ...]

DELETE = "_delete_"  # a dict with this key set to True replaces what it would be merged into
WHOLE_NUMBER = re.compile(r"0|-?[1-9][0-9]{0,17}")  # text that stands for an int key, one spelling for each number
PLAIN_KEY = re.compile(r"[^\s.=\"'-]+")  # text that needs no quotes in a dotted name


@dataclass(frozen=True)
class Origin:
    """Where a value was written, and the names it was computed from."""

    place: str  # `configs/x.py:3` or `--optim.lr`
    sources: tuple[tuple[str, str], ...] = ()  # (name, place) of values a derived one uses, and of flags behind them

    def __str__(self) -> str:
        """`configs/image.py:12, from lr (--lr)`."""
        if not self.sources:
            return self.place
        return f"{self.place}, from " + ", ".join(f"{name} ({place})" for name, place in self.sources)

    @property
    def is_flag(self) -> bool:
        return self.place.startswith("--")

    def derived(self, used: Mapping[str, Origin]) -> Origin:
        """This place, for a value computed from the named ones."""
        sources: dict[tuple[str, str], None] = {}
        for name, origin in used.items():
            sources[name, origin.place] = None
            sources.update(dict.fromkeys(source for source in origin.sources if source[1].startswith("--")))
        return Origin(self.place, tuple(sources))


@dataclass(frozen=True)
class Leaf:
    """A value that is replaced as a whole: text, number, True, False, None, list or tuple (plain data inside)."""

    value: Any
    origin: Origin


@dataclass(frozen=True)
class Branch:
    """A dict: it is merged key by key."""

    items: dict[Key, Node]
    origin: Origin
    replaces: bool = False  # written with `_delete_=True`: takes the place of what is below


Node = Leaf | Branch


def grow(value: Any, origin: Origin) -> Node:
    """Return the tree of plain data, every value of it written at `origin`. Raises ValueError on a bad key."""
    if not isinstance(value, Mapping):
        return Leaf(value, origin)
    return branch([(key, grow(item, origin)) for key, item in value.items()], origin)


def branch(items: list[tuple[object, Node]], origin: Origin) -> Branch:
    """Return a branch of these items, later ones taking the place of earlier ones; `_delete_` becomes its
    `replaces`. Raises ValueError for a key of another kind, 33 beside "33", and a `_delete_` that is neither True
    nor False."""
    kept: dict[Key, Node] = {}
    replaces = False
    for key, node in items:
        if key == DELETE:
            if not isinstance(node, Leaf) or not isinstance(node.value, bool):
                raise ValueError("_delete_ must be True or False")
            replaces = node.value
            continue
        if isinstance(key, bool) or not isinstance(key, (str, int)):
            raise ValueError(f"a key must be text or a whole number, not {shown(key)}")
        if matching_key(kept, key) != key:
            raise ValueError(f"the keys {shown(key)} and {shown(matching_key(kept, key))} name the same entry")
        kept[key] = node
    return Branch(kept, origin, replaces)


def plain(node: Node, marks: bool = False) -> Any:
    """Return the tree as plain data: dicts, lists, tuples and scalars. `marks` keeps each `_delete_`, for `grow` to
    find."""
    if isinstance(node, Leaf):
        return node.value
    data: dict[Any, Any] = {key: plain(item, marks) for key, item in node.items.items()}
    return {DELETE: True, **data} if marks and node.replaces else data


def settled(node: Node) -> Node:
    """Return the tree with every `_delete_` forgotten: what a name stands for once it has been merged."""
    if isinstance(node, Leaf):
        return node
    return Branch({key: settled(item) for key, item in node.items.items()}, node.origin)


def merge(below: Node | None, above: Node, report: Callable[[Fault], None], path: KeyPath = ()) -> Node:
    """What `above` makes of `below`: dicts merge key by key, everything else is replaced.

    `_delete_` and None replace whatever they meet. A dict over a value that is none (or the reverse) is reported, and
    `above` kept. Merging is associative wherever nothing is reported: merge(a, merge(b, c)) = merge(merge(a, b), c);
    for that, a branch that took the place of something keeps its `replaces`.
    """
    if below is None or (isinstance(above, Branch) and above.replaces):
        return above
    if isinstance(above, Leaf):
        if isinstance(below, Branch) and above.value is not None:
            rule = f"must be a dict, because it is one in {below.origin.place}"
            report(Fault(above.origin.place, shown(above.value), rule, "write dict(...), or None", dotted(path)))
        return above
    if isinstance(below, Leaf):
        if below.value is not None:
            rule = f"cannot be a dict, because it is {shown(below.value)} in {below.origin.place}"
            fix = f"write a single value, or {DELETE}=True in the dict to replace it"
            report(Fault(above.origin.place, shown(plain(above)), rule, fix, dotted(path)))
        return Branch(above.items, above.origin, replaces=True)
    items = dict(below.items)
    for key, node in above.items.items():
        here = matching_key(items, key)
        items[here] = merge(items.get(here), node, report, (*path, here))
    return Branch(items, above.origin, below.replaces)


def matching_key(items: Mapping[Key, Any], key: Key) -> Key:
    """Return the key of `items` that means the same as `key`: 33 and "33" are one; `key` itself where there is none."""
    if key in items:
        return key
    twin = number_key(key) if isinstance(key, str) else str(key)
    return twin if twin in items else key


def number_key(key: Key) -> Key:
    """Text that spells a whole number as that number; any other key as it is."""
    return int(key) if isinstance(key, str) and WHOLE_NUMBER.fullmatch(key) else key


def dotted(path: KeyPath) -> str:
    """Return the path as one name, `bucket_config.256px.33`, as a flag spells it: a text key that would be read as
    something else there, because it has dots, dashes, blanks or quotes or spells a number, is quoted."""

    def spelled(key: Key) -> str:
        plain = isinstance(key, int) or (PLAIN_KEY.fullmatch(key) and not WHOLE_NUMBER.fullmatch(key))
        return str(key) if plain else quote(key)

    return ".".join(map(spelled, path))


def leaves(node: Node, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Node]]:
    """Every leaf of the tree and every empty branch, with its path, in order."""
    if isinstance(node, Leaf) or not node.items:
        if path:
            yield path, node
        return
    for key, item in node.items.items():
        yield from leaves(item, (*path, key))


def nearest(node: Node, path: KeyPath) -> Node:
    """Return the deepest node on the way along `path`."""
    for key in path:
        if isinstance(node, Leaf):
            return node
        here = matching_key(node.items, key)
        if here not in node.items:
            return node
        node = node.items[here]
    return node
