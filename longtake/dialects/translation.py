"""A tree of another system's keys, which becomes one of Longtake's."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from longtake.config.faults import Fault, shown
from longtake.config.load import Heights
from longtake.config.tree import Branch, Leaf, Node, Origin, grow, matching_key, plain

Report = Callable[[Fault], None]
Say = Callable[[str], None]


class SayOnce:
    """Print each line once, by default on stderr of the first process."""

    def __init__(self, say: Say | None = None) -> None:
        self._say, self._said = say or _on_stderr, set[str]()

    def __call__(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._say(line)


def _on_stderr(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr)


def _pass_over(_: object) -> None:
    pass


def value_of(node: Node | None) -> Any:
    """Plain value of a node; None without one."""
    return None if node is None else plain(node)


class Translation:
    """Take keys out of a tree and put others in.

    A flag outranks a file, and a file its base, in either system's keys. Two values of one layer that differ, one in
    each system's keys, are a fault.
    """

    def __init__(
        self, tree: Branch, heights: Heights, report: Report, say: Say, flags: Iterable[str] = frozenset()
    ) -> None:
        """flags: names on the command line. The file is also read without them, to see the kind of run; nothing is
        logged or refused then."""
        self.tree, self.heights, self.report, self.say = tree, heights, report, say
        self.is_whole = all(map(self.is_flag, flags))
        if not self.is_whole:
            self.report, self.say = _pass_over, _pass_over
        self.laid: set[str] = set()  # names that nobody wrote: defaults, presets
        self.in_file = False  # True where a file, not flags alone, has keys of the other system
        self.typed_names: dict[str, str] = {}  # Longtake's key -> the other system's name that the user typed for it
        self._names_by_origin: dict[Origin, str] = {}

    def get(self, name: str) -> Node | None:
        """Return the node at a dotted name."""
        node: Node = self.tree
        for part in name.split("."):
            if not isinstance(node, Branch) or (key := matching_key(node.items, part)) not in node.items:
                return None
            node = node.items[key]
        return node

    def value(self, name: str) -> Any:
        return value_of(self.get(name))

    def take(self, name: str) -> Node | None:
        """Remove the node at a dotted name and return it, and sections that are empty without it."""
        node = self.get(name)
        if node is not None:
            self.in_file |= not self.heights.is_flag(node.origin)
            if node.origin != self.tree.origin:  # in TOML files, all keys have one
                self._names_by_origin[node.origin] = node.origin.place if node.origin.is_flag else name
            cut = _without(self.tree, name.split("."))
            self.tree = cut if cut is not None else Branch({}, self.tree.origin)
        return node

    def put(self, name: str, value: Any, like: Node, typed_as: str = "") -> None:
        """Write plain data at a dotted name, in the layer of `like`, unless a higher layer has the name.

        None is only written over a value. typed_as: the key that the user wrote; with it, another value of the same
        layer is a fault.
        """
        if isinstance(value, Mapping):
            for key, item in value.items():
                self.put(f"{name}.{key}", item, like, typed_as)
            return
        typed = typed_as or self._names_by_origin.get(like.origin, "")
        if typed and typed != name:
            self.typed_names[name] = f"--{typed}" if like.origin.is_flag and not typed.startswith("--") else typed
        there = self.get(name)
        if there is None and value is None:
            return
        if isinstance(there, Leaf):
            here, other = self.heights(like.origin), self.heights(there.origin)
            if other > here:
                return
            if other == here and plain(there) != value and typed_as and name not in self.laid:
                rule = f"contradicts {name} = {shown(there.value)} ({there.origin})"
                self.report(Fault(str(like.origin), shown(plain(like)), rule, "keep one of the two", typed_as))
                return
        self.laid.discard(name)
        self.tree = _with(self.tree, name.split("."), grow(value, like.origin))

    def lay(self, name: str, value: Any) -> None:
        """Write plain data beneath all that is written."""
        if isinstance(value, Mapping):
            for key, item in value.items():
                self.lay(f"{name}.{key}", item)
        elif self.get(name) is None:
            self.put(name, value, self.tree)
            self.laid.add(name)

    def note(self, name: str, node: Node, text: str) -> None:
        """Print what Longtake does instead of a key."""
        self.say(f"{name} = {shown(plain(node))} ({node.origin}): {text}")

    def refuse(self, name: str, node: Node, rule: str, fix: str = "") -> None:
        if isinstance(node, Branch) and node == self.tree:  # nothing is written there
            self.report(Fault("", "", rule, fix, name))
            return
        self.report(Fault(str(node.origin), shown(plain(node)), rule, fix, name))

    def report_at(self, place: str, name: str, value: Any, rule: str, fix: str = "") -> None:
        """Report a key that is not in the tree."""
        self.report(Fault(place, shown(value), rule, fix, name))

    def number(self, name: str, default: float) -> float:
        """Return the number at a dotted name; the default for other values, which the schema refuses."""
        value = self.value(name)
        return value if isinstance(value, (int, float)) and not isinstance(value, bool) else default

    def is_flag(self, name: str) -> bool:
        """Return True where a key is on the command line."""
        node = self.get(name)
        return node is not None and self.heights.is_flag(node.origin)

    def is_given(self, name: str) -> bool:
        """Return True where a file or a flag has a key, and not a default alone."""
        return self.get(name) is not None and name not in self.laid

    def place(self, name: str) -> Node:
        """Return the node at a dotted name, else the lowest place."""
        return self.get(name) or self.tree


def recompute_fully(work: Translation, like: Node) -> None:
    """Save the inputs of recomputed blocks alone, as the other systems do: batch sizes were chosen for that memory.
    A run that sets its own level keeps it."""
    key = "model.recompute"
    if work.value("model.grad_ckpt_settings") and work.get(key) is None:
        work.put(key, "full", like)


def recompute_nothing(work: Translation, like: Node) -> None:
    """Recompute no block, also where a preset beneath does."""
    work.put("model.grad_ckpt_settings", None, like, "")
    work.put("model.recompute", "none", like, "")


def _without(branch: Branch, parts: list[str]) -> Branch | None:
    """Return the branch without the node at the end of `parts`; None where nothing is left."""
    key = matching_key(branch.items, parts[0])
    items = dict(branch.items)
    node = items[key]
    cut = _without(node, parts[1:]) if len(parts) > 1 and isinstance(node, Branch) else None
    if cut is None:
        del items[key]
    else:
        items[key] = cut
    return Branch(items, branch.origin, branch.replaces) if items else None


def _with(branch: Branch, parts: list[str], node: Node) -> Branch:
    key = matching_key(branch.items, parts[0])
    if len(parts) > 1:
        inner = branch.items.get(key)
        node = _with(inner if isinstance(inner, Branch) else Branch({}, node.origin), parts[1:], node)
    return Branch({**branch.items, key: node}, branch.origin, branch.replaces)
