"""Files to statements: which names a file assigns, in which order, and which bases it names. Nothing is executed."""

from __future__ import annotations

import ast
import math
import os
import re
import tomllib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longtake.config.evaluator import ALLOWED, CALLS, MAX_BITS, MAX_LEVELS, Budget, Evaluator, Stop
from longtake.config.faults import Fault, shorten, shown
from longtake.config.tree import DELETE, Key, KeyPath, Leaf, Node, Origin, branch

MAX_BYTES = 500_000  # of a file
MAX_DEPTH = MAX_LEVELS + 10  # of brackets and operators within each other
MAX_STATEMENTS = 5_000  # of a file
MAX_TOML_BYTES, MAX_DOTS = 250_000, 400  # the TOML parser's time grows with the parts of a key, on every line
BASE = "_base_"
SYNTAX = "is not Python syntax"


@dataclass(eq=False)
class Statement:
    """One assignment: `expr` is evaluated when its value is asked for; TOML, flags and plain data have a `node`."""

    name: str
    origin: Origin
    expr: ast.expr | None = None
    node: Node | None = None


@dataclass(eq=False)
class Source:
    """What one file says."""

    file: str  # as messages show it
    lines: list[bytes] = field(default_factory=list)
    statements: list[Statement] = field(default_factory=list)
    bases: list[str] = field(default_factory=list)  # as written, relative to the file
    bases_origin: Origin | None = None
    broken: set[str] = field(default_factory=set)  # names whose assignment was refused


class Unreadable(Exception):
    """Nothing could be made of the file; the reason has been reported."""


def shown_path(path: Path) -> str:
    """The path as messages show it: relative to the working directory where it lies below that."""
    absolute, here = os.path.abspath(path), os.getcwd()
    return os.path.relpath(absolute, here) if absolute.startswith(here + os.sep) else str(path)


def read_source(path: Path, report: Callable[[Fault], None]) -> Source:
    """Read a `.py` or `.toml` file. Raises Unreadable after reporting why."""
    text = read_text(path, report)
    source = Source(shown_path(path), lines=text.encode("utf-8").split(b"\n"))
    if path.suffix == ".toml":
        read_toml(text, source, report)
    else:
        read_python(text, source, report)
    return source


def read_text(path: Path, report: Callable[[Fault], None]) -> str:
    """The text of a file. Raises Unreadable after reporting what hinders."""
    place = shown_path(path)

    def refuse(rule: str, fix: str) -> Unreadable:
        report(Fault(place, "", rule, fix))
        return Unreadable()

    if path.suffix not in (".py", ".toml"):
        raise refuse("is no configuration file", "its name must end in .py or .toml")
    try:
        if path.is_dir():
            raise refuse("is a folder", "name the configuration file in it")
        if not path.exists():
            raise refuse("does not exist", "check the path; it is relative to the working directory")
        if not path.is_file():
            raise refuse("is no regular file", "name a .py or .toml file")
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise refuse(f"cannot be read ({reason})", "check the path and its permissions") from None
    if len(data) > MAX_BYTES:
        raise refuse("is too large for a configuration", f"it may have {MAX_BYTES:,} bytes")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        report(Fault(f"{place}:{line}", "", "is not UTF-8 text", "save the file as UTF-8"))
        raise Unreadable from None
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        report(Fault(f"{place}:{line}", "", "holds a null byte", "a configuration is a text file"))
        raise Unreadable
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_python(text: str, source: Source, report: Callable[[Fault], None]) -> None:
    """Take the assignments of a Python-syntax file. Raises Unreadable after reporting a syntax error."""
    try:
        module = parse_python(text, "exec")
    except SyntaxError as error:
        line = error.lineno or 1
        shown_line = source.lines[line - 1].decode() if 0 < line <= len(source.lines) else ""
        report(Fault(f"{source.file}:{line}", shorten(shown_line), f"{SYNTAX} ({error.msg})", "mend the line"))
        raise Unreadable from None
    except (RecursionError, MemoryError):
        report(Fault(source.file, "", f"{SYNTAX}: brackets or operators are nested too deeply", "write it flatter"))
        raise Unreadable from None
    except ValueError as error:
        report(Fault(source.file, "", f"{SYNTAX} ({error})", "mend the file"))
        raise Unreadable from None
    if sum(len(line.targets) if isinstance(line, ast.Assign) else 1 for line in module.body) > MAX_STATEMENTS:
        report(Fault(source.file, "", "is too long", f"a configuration has at most {MAX_STATEMENTS:,} assignments"))
        raise Unreadable
    for line in module.body:
        read_statement(line, source, report)


def parse_python(text: str, mode: str) -> Any:
    """The syntax tree of Python text, without the warnings that Python prints about odd literals."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text, mode=mode)


def read_statement(line: ast.stmt, source: Source, report: Callable[[Fault], None]) -> None:
    """Take one line of a Python-syntax file: assignments and free-standing text are known."""
    # No names in sight: this evaluator shows what is wrong and works out `_base_`.
    evaluator = Evaluator(source.file, source.lines, lambda name: None, list, Budget(), report)
    origin = evaluator.origin(line)
    if isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) and isinstance(line.value.value, str):
        return
    targets = line.targets if isinstance(line, ast.Assign) else [line.target] if isinstance(line, ast.AnnAssign) else []
    names = [target.id for target in targets if isinstance(target, ast.Name)]
    value = getattr(line, "value", None)
    if isinstance(line, ast.AnnAssign) and value is None:
        return
    try:
        if not names or len(names) != len(targets):
            evaluator.fault(line, "is not an assignment to a name", f"write name = value; {ALLOWED}")
        if depth(value) > MAX_DEPTH:
            evaluator.fault(line, "is nested too deeply", f"at most {MAX_DEPTH} levels are read")
        for name in names:
            if name in CALLS:
                evaluator.fault(line, f"gives a new meaning to {name}", "choose another name")
            if name == DELETE:
                evaluator.fault(line, "stands alone", f"{DELETE}=True belongs inside the dict that replaces its base")
            if name == BASE:
                add_bases(evaluator.plain_value(value, {}), shorten(evaluator.source(value)), origin, source, report)
            else:
                source.statements.append(Statement(name, origin, expr=value))
    except Stop:
        source.broken.update(names)


def depth(expr: ast.AST) -> int:
    """How many levels of brackets and operators an expression has."""
    deepest, stack = 0, [(expr, 1)]
    while stack:
        node, level = stack.pop()
        deepest = max(deepest, level)
        stack.extend((child, level + 1) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr))
        for part in ast.iter_child_nodes(node):
            if isinstance(part, (ast.keyword, ast.comprehension)):
                stack.append((part, level))
    return deepest


def add_bases(value: Any, text: str, origin: Origin, source: Source, report: Callable[[Fault], None]) -> None:
    """Take `_base_`: a path or a list of paths. Raises Stop after reporting anything else."""
    paths = [value] if isinstance(value, str) else value
    if not isinstance(paths, (list, tuple)) or not all(isinstance(path, str) and path for path in paths):
        report(
            Fault(origin.place, text, f"{BASE} is not a path", f'write {BASE} = "x.py" or {BASE} = ["x.py", "y.py"]')
        )
        raise Stop
    if source.bases_origin is not None:
        report(Fault(origin.place, text, f"{BASE} is named twice", f"write one list: {BASE} = [...]"))
        raise Stop
    source.bases, source.bases_origin = list(paths), origin


def read_toml(text: str, source: Source, report: Callable[[Fault], None]) -> None:
    """Take the keys of a TOML file. Raises Unreadable after reporting a syntax error."""
    if len(text) > MAX_TOML_BYTES:
        report(Fault(source.file, "", "is too large for TOML", f"it may have {MAX_TOML_BYTES:,} characters"))
        raise Unreadable
    for number, line in enumerate(text.split("\n"), 1):
        if line.count(".") > MAX_DOTS:
            report(Fault(f"{source.file}:{number}", "", f"has more than {MAX_DOTS} dots", "break the line"))
            raise Unreadable
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"\(at line (\d+), column \d+\)", str(error))
        place = f"{source.file}:{found[1]}" if found else source.file
        reason = re.sub(r"\s*\(at .*\)$", "", str(error))
        report(Fault(place, "", f"is not TOML ({reason})", "text stands in quotes, tables in [brackets]"))
        raise Unreadable from None
    except (RecursionError, MemoryError, ValueError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        report(Fault(source.file, "", f"is not TOML ({reason})", "write it flatter"))
        raise Unreadable from None
    lines = toml_lines(text)
    for name, value in table.items():
        origin = Origin(f"{source.file}:{lines.get((name,), 1)}")
        try:
            if name == BASE:
                add_bases(value, shown(value), origin, source, report)
            elif name.startswith("_"):
                rule = "is no key: names that start with _ are the variables of Python files"
                report(Fault(origin.place, "", rule, "rename it", name))
                source.broken.add(name)
            else:
                node = toml_node(value, (name,), origin, lines, source, report)
                source.statements.append(Statement(name, node.origin, node=node))
        except Stop:
            source.broken.add(name)


def toml_node(
    value: Any,
    path: KeyPath,
    origin: Origin,
    lines: dict[tuple[str, ...], int],
    source: Source,
    report: Callable[[Fault], None],
) -> Node:
    """The tree of a TOML value. Raises Stop after reporting a date, a number that is not finite, or a bad key."""
    if path in lines:
        origin = Origin(f"{source.file}:{lines[path]}")
    key = ".".join(str(part) for part in path)
    if len(path) > MAX_LEVELS:
        report(Fault(origin.place, "", "is nested too deeply", f"at most {MAX_LEVELS} levels are read"))
        raise Stop
    if isinstance(value, dict):
        items: list[tuple[Key, Node]] = [
            (name, toml_node(item, (*path, name), origin, lines, source, report)) for name, item in value.items()
        ]
        try:
            return branch(list(items), origin)
        except ValueError as error:
            report(Fault(origin.place, "", str(error), "", key))
            raise Stop from None
    # An unknown kind of leaf hides as well in a list as outside of one.
    stack = [(value, len(path))]
    while stack:
        item, level = stack.pop()
        if isinstance(item, (list, dict)) and level < MAX_LEVELS:
            stack.extend((part, level + 1) for part in (item.values() if isinstance(item, dict) else item))
        elif isinstance(item, int) and item.bit_length() > MAX_BITS:
            report(Fault(origin.place, "", "is too large a number", f"it may have {MAX_BITS} bits", key))
            raise Stop
        elif not isinstance(item, (str, int, float)) or (isinstance(item, float) and not math.isfinite(item)):
            rule = "is not text, a finite number, true, false, a list or a table"
            report(Fault(origin.place, shown(item), rule, "write dates and the like as text in quotes", key))
            raise Stop
    return Leaf(value, origin)


def toml_lines(text: str) -> dict[tuple[str, ...], int]:
    """The line each key of a TOML text is written on, found line by line; a key within braces has its table's line."""
    part = r"""(?:[A-Za-z0-9_-]+|"[^"\\]*"|'[^']*')"""
    name = rf"\s*({part}(?:\s*\.\s*{part})*)\s*"
    header, assignment, parts = re.compile(rf"\[{name}\]"), re.compile(rf"{name}="), re.compile(part)
    lines: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.split("\n"), 1):
        match = header.match(line.strip()) or assignment.match(line)
        if match is None:
            continue
        path = tuple(piece.strip("\"'") for piece in parts.findall(match[1]))
        if match.re is header:
            table = path
            known = 0
        else:
            path, known = table + path, len(table)
        if len(path) <= MAX_LEVELS:
            for end in range(known + 1, len(path) + 1):
                lines.setdefault(path[:end], number)
    return lines
