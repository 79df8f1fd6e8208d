"""A tree of keys on its way from another system's words to Longtake's."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from longtake.config import Fault, Heights
from longtake.config.faults import shown
from longtake.config.tree import Branch, Leaf, Node, Origin, grow, matching_key, plain

Report = Callable[[Fault], None]
Say = Callable[[str], None]


class SayOnce:
    """Says each line once, by default on stderr of the first process."""

    def __init__(self, say: Say | None = None) -> None:
        self._say, self._said = say or _on_stderr, set[str]()

    def __call__(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._say(line)


def _on_stderr(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr)


@dataclass(frozen=True)
class Fixed:
    """A word that can have some values only, and moves nothing."""

    values: tuple[Any, ...]  # that mean what Longtake does anyway
    stands: str = ""  # what stands in its place; empty: nothing needs to be said
    otherwise: str = ""  # what to do where another value is wanted


def _pass_over(_: object) -> None:
    pass


def value_of(node: Node | None) -> Any:
    """Its plain value; None where nothing stands there."""
    return None if node is None else plain(node)


class Translation:
    """Takes words out of a tree and puts others in. Whichever words it is written in, what was written higher up
    counts; two values of one height that differ are a fault."""

    def __init__(
        self, tree: Branch, heights: Heights, report: Report, say: Say, flags: Iterable[str] = frozenset()
    ) -> None:
        """flags: names on the command line. Without them the file is looked at too, to see what kind of run it is:
        nothing is said or refused then."""
        self.tree, self.heights, self.report, self.say = tree, heights, report, say
        self.is_whole = all(map(self.is_flag, flags))
        if not self.is_whole:
            self.report, self.say = _pass_over, _pass_over
        self.laid: set[str] = set()  # names that nobody wrote: defaults, presets
        self.in_file = False  # whether a file, not flags alone, has words of the other system
        self.typed_names: dict[str, str] = {}  # Longtake's key -> the other system's name that the user typed for it
        self._names_by_origin: dict[Origin, str] = {}

    def get(self, name: str) -> Node | None:
        """What stands at a dotted name."""
        node: Node = self.tree
        for part in name.split("."):
            if not isinstance(node, Branch) or (key := matching_key(node.items, part)) not in node.items:
                return None
            node = node.items[key]
        return node

    def value(self, name: str) -> Any:
        return value_of(self.get(name))

    def take(self, name: str) -> Node | None:
        """Removes what stands at a dotted name and returns it. A section that is left empty by this goes too."""
        node = self.get(name)
        if node is not None:
            self.in_file |= not self.heights.is_flag(node.origin)
            if node.origin != self.tree.origin:  # in TOML files, all keys have one
                self._names_by_origin[node.origin] = node.origin.place if node.origin.is_flag else name
            cut = _without(self.tree, name.split("."))
            self.tree = cut if cut is not None else Branch({}, self.tree.origin)
        return node

    def put(self, name: str, value: Any, like: Node, said_as: str = "") -> None:
        """Writes plain data at a dotted name as if it stood where `like` does, unless something higher is there; None
        only over something. `said_as`: the word that the user wrote."""
        if isinstance(value, Mapping):
            for key, item in value.items():
                self.put(f"{name}.{key}", item, like, said_as)
            return
        typed = said_as or self._names_by_origin.get(like.origin, "")
        if typed and typed != name:
            self.typed_names[name] = f"--{typed}" if like.origin.is_flag and not typed.startswith("--") else typed
        there = self.get(name)
        if there is None and value is None:
            return
        if isinstance(there, Leaf):
            here, other = self.heights(like.origin), self.heights(there.origin)
            if other > here:
                return
            if other == here and plain(there) != value and said_as and name not in self.laid:
                rule = f"says another thing than {name} = {shown(there.value)} ({there.origin})"
                self.report(Fault(str(like.origin), shown(plain(like)), rule, "keep one of the two", said_as))
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
        """Says what stands in the place of a word."""
        self.say(f"{name} = {shown(plain(node))} ({node.origin}): {text}")

    def refuse(self, name: str, node: Node, rule: str, fix: str = "") -> None:
        self.report(Fault(str(node.origin), shown(plain(node)), rule, fix, name))

    def report_at(self, place: str, name: str, value: Any, rule: str, fix: str = "") -> None:
        """Refuses a word that stands in no part of the tree."""
        self.report(Fault(place, shown(value), rule, fix, name))

    def number(self, name: str, default: float) -> float:
        """The number at a dotted name; the default where none stands there, which its own place will refuse."""
        value = self.value(name)
        return value if isinstance(value, (int, float)) and not isinstance(value, bool) else default

    def is_flag(self, name: str) -> bool:
        """Whether a word stands on the command line."""
        node = self.get(name)
        return node is not None and self.heights.is_flag(node.origin)

    def is_given(self, name: str) -> bool:
        """True where a file or a flag has a key, and not a default alone."""
        return self.get(name) is not None and name not in self.laid

    def place(self, name: str) -> Node:
        """The node at a dotted name, else the lowest place."""
        return self.get(name) or self.tree

    def move(self, names: Mapping[str, str], wins: bool = False) -> None:
        """Words that have another name here: old name -> new name. `wins`: in a file they count before the new name."""
        for old, new in names.items():
            if (node := self.take(old)) is not None:
                silent = wins and not self.heights.is_flag(node.origin)
                self.put(new, plain(node), node, "" if silent else old)

    def switch(self, words: Mapping[str, tuple[str, Any]]) -> None:
        """Words that turn something on: name -> key and its value here. One that is off says nothing."""
        for name, (key, value) in words.items():
            if (node := self.take(name)) is not None and plain(node):
                self.put(key, value, node)

    def leave(self, words: Mapping[str, str]) -> None:
        """Words that are not needed here: name -> what stands in their place."""
        for name, text in words.items():
            if (node := self.take(name)) is not None and plain(node) is not None:
                self.note(name, node, text)

    def fix(self, words: Mapping[str, Fixed]) -> None:
        """Words that can have some values only."""
        for name, fixed in words.items():
            if (node := self.take(name)) is None:
                continue
            value = plain(node)
            if any(value == allowed and type(value) is type(allowed) for allowed in fixed.values):
                if fixed.stands:
                    self.note(name, node, fixed.stands)
            else:
                allowed = " or ".join(shown(option) for option in fixed.values)
                self.refuse(name, node, f"must be {allowed} here", fixed.otherwise)

    def drop_none(self, names: Iterable[str]) -> None:
        """Keys whose None means the default."""
        for name in names:
            node = self.get(name)
            if isinstance(node, Leaf) and node.value is None:
                self.take(name)

    def refuse_rest(self, section: str, known: Iterable[str]) -> None:
        """Reports every key that is left in a section which Longtake does not have."""
        if (node := self.take(section)) is None or plain(node) is None:
            return
        if isinstance(node, Leaf):
            self.refuse(section, node, "must be a dict", "write dict(key=value)")
            return
        for key, item in node.items.items():
            self.refuse(f"{section}.{key}", item, "is no word of it", f"there are {', '.join(known)}")


def recompute_fully(work: Translation, like: Node) -> None:
    """Recomputed blocks save their inputs alone, as in the other systems: batch sizes were chosen for that memory.
    A run that sets its own level is left as it is."""
    key = "model.recompute"
    if work.value("model.grad_ckpt_settings") and work.get(key) is None:
        work.put(key, "full", like)


def recompute_nothing(work: Translation, like: Node) -> None:
    """No block is recomputed, whatever a preset below says."""
    work.put("model.grad_ckpt_settings", None, like, "")
    work.put("model.recompute", "none", like, "")


def _without(branch: Branch, parts: list[str]) -> Branch | None:
    """The branch without what stands at the end of `parts`; None where nothing is left."""
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
