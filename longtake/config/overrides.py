"""Command-line flags as a layer of the configuration: `--a.b-c 3`, `--a.b=3`, `--flag`."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from longtake.config.evaluator import MAX_LEVELS, Evaluator, Stop
from longtake.config.faults import Fault, shown
from longtake.config.reader import parse_python
from longtake.config.schema import entries_of, forms_at, kinds
from longtake.config.tree import Branch, Key, KeyPath, Leaf, Node, Origin, dotted, grow, merge, number_key, plain

SEGMENT = r"""[^\s.="']+|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'"""
NAME = re.compile(rf"--(?P<name>(?:{SEGMENT})(?:\.(?:{SEGMENT}))*)(?:=(?P<text>.*))?", re.DOTALL)
WORDS = {"none": None, "null": None, "true": True, "false": False}
CONTAINERS = frozenset({"list", "tuple", "dict"})
NAME_FIX = "write --name value, with dots between the parts of a name"


@dataclass(frozen=True)
class Flag:
    path: KeyPath
    text: str | None  # None: the flag stands alone and means True

    @property
    def place(self) -> str:
        return "--" + dotted(self.path)


def split_flags(arguments: Sequence[str], report: Callable[[Fault], None]) -> list[Flag]:
    """Command-line words as flags. What is no flag is reported and left out."""
    flags: list[Flag] = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        if not word.startswith("--") or word == "--":
            fix = f"write -{word} value" if re.match(r"-[A-Za-z]", word) else NAME_FIX
            report(Fault("command line", shown(word), "is not a flag and follows none", fix))
            continue
        match = NAME.fullmatch(word)
        path = key_path(match["name"]) if match else None
        text = match["text"] if match else None
        alone = text is None if match else "=" not in word
        if alone and words and not words[0].startswith("--"):
            text = words.pop(0)
        if path is None:
            report(Fault("command line", shown(word), "is not the name of a key", NAME_FIX))
        else:
            flags.append(Flag(path, text))
    return flags


def key_path(name: str) -> KeyPath | None:
    """Return the path that the name of a flag spells; None where it can be none of a key."""
    path: list[Key] = []
    for part in re.findall(SEGMENT, name, re.DOTALL):
        if part[0] not in "\"'":
            key = number_key(part)
            path.append(key.replace("-", "_") if isinstance(key, str) else key)
            continue
        try:
            path.append(ast.literal_eval(parse_python(part, "eval").body))
        except (SyntaxError, ValueError):
            return None
    named = isinstance(path[0], str) and not path[0].startswith("_") and len(path) <= MAX_LEVELS // 2
    return tuple(path) if named else None


def flag_tree(flags: Sequence[Flag], schema: Any, report: Callable[[Fault], None]) -> Branch:
    """Return the flags as one tree, their text read by the schema's types. Of two flags of one name the later
    counts, but the entries of a list are taken from all of them; a longer name is laid over a shorter one."""
    alike: dict[str, list[Flag]] = {}
    for flag in flags:
        alike[flag.place] = [*alike.pop(flag.place, []), flag]
    tree: Node = Branch({}, Origin("command line"))
    for same in alike.values():
        flag = same[-1]
        found = forms_at(schema, flag.path)
        fitting, entries = kinds(found), entries_of(found)
        if flag.text is None and fitting and "bool" not in fitting:
            report(Fault(flag.place, "", "needs a value", f"write {flag.place} value"))
            continue
        try:
            wanted = fitting | kinds(entries) if entries else fitting
            values = [True if one.text is None else convert(one.text, wanted) for one in same]
            value = joined(values, entries, fitting) if entries else values[-1]
            for key in reversed(flag.path):
                value = {key: value}
            node = grow(value, Origin(flag.place))
        except ValueError as error:
            report(Fault(flag.place, shown(flag.text), str(error)))
            continue
        tree = merge(tree, node, report)
    assert isinstance(tree, Branch)
    return tree


def joined(values: Sequence[Any], entries: tuple[Any, ...], fitting: frozenset[str]) -> Any:
    """Return the value of a key that takes a list, by several flags: the entries of all, those before a None left out.

    `entries`: the forms of an entry, as `entries_of` gives them. One flag alone may give a value that is no list.
    """
    nested = kinds(entries) <= CONTAINERS
    found: list[Any] = []
    for value in values:
        if value is None:
            found = []
        elif isinstance(value, (list, tuple)) and (
            not nested or all(isinstance(x, (list, tuple, dict)) for x in value)
        ):
            found += value
        else:
            found.append(value)
    as_given = len(values) == 1 and (found != values or not fitting <= CONTAINERS | {"none"})
    return values[-1] if as_given or values[-1] is None else found


def convert(text: str, fitting: frozenset[str]) -> Any:
    """Return the value that a flag's text means, where values of the kinds `fitting` are wanted (empty: any).

    In this order: none; a list, tuple, dict or quoted text in Python notation; true and false; a number; text. What
    does not fit while text does stays text: `--name 123` gives "123" to a key that takes text only.
    """
    takes_text = "text" in fitting

    def takes(*wanted: str) -> bool:
        return not takes_text or not fitting.isdisjoint(wanted)

    word = WORDS.get(text.strip().lower(), text)
    if word is None and takes("none"):
        return None
    found, value = python_value(text)
    if found and (isinstance(value, str) or takes(*CONTAINERS)):
        return value
    if isinstance(word, bool) and takes("bool"):
        return word
    number = parse_number(text.strip())
    if number is not None and takes("int", "float"):
        if isinstance(number, float) and float(number).is_integer() and "int" in fitting and "float" not in fitting:
            return int(number)
        return number
    return text


def parse_number(text: str) -> int | float | None:
    """Return the number a text spells in ASCII digits; None where it spells none, or one beyond a double's range."""
    for kind in (int, float):
        with suppress(ValueError):
            number = kind(text)
            return number if text.isascii() and len(text) <= 300 and math.isfinite(number) else None
    return None


def python_value(text: str) -> tuple[bool, Any]:
    """Whether a text is a list, a tuple, a dict or a quoted text in Python notation; and its value."""
    if not text.strip().startswith(("[", "(", "{", '"', "'", "dict(")):
        return False, None
    words = {name: Leaf(value, Origin("flag")) for word, value in WORDS.items() for name in (word, word.capitalize())}
    evaluator = Evaluator("flag", [], lookup=words.get, known=list, report=lambda fault: None)
    try:
        expr = parse_python(text.strip(), "eval").body
        if not isinstance(expr, (ast.List, ast.Tuple, ast.Dict, ast.Constant, ast.Call)):
            return False, None
        return True, plain(evaluator.statement(expr), marks=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError, Stop):
        return False, None
