"""Files to statements: which names a file assigns, in which order, and which bases it names. Nothing is executed."""

from __future__ import annotations

import ast
import os
import re
import tomllib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longtake.config.evaluator import MAX_SIZE, Evaluator, Stop, scalar_fault, size_fault
from longtake.config.faults import ConfigError, Fault, shorten, shown
from longtake.config.tree import DELETE, Node, Origin, grow
from longtake.small_files import read_small

BASE = "_base_"


@dataclass(eq=False)
class Statement:
    """One assignment: `expr` is evaluated when its value is asked for; TOML, flags and plain data have a `node`."""

    name: str
    origin: Origin
    expr: ast.expr | None = None
    node: Node | None = None


@dataclass(eq=False)
class Source:
    file: str  # as messages show it
    lines: list[bytes] = field(default_factory=list)
    statements: list[Statement] = field(default_factory=list)
    bases: list[str] = field(default_factory=list)  # as written, relative to the file
    bases_origin: Origin | None = None
    broken: set[str] = field(default_factory=set)  # names whose assignment was refused


def shown_path(path: Path) -> str:
    """Return the path as messages show it: relative to the working directory where it lies below that."""
    absolute, here = os.path.abspath(path), os.getcwd()
    return os.path.relpath(absolute, here) if absolute.startswith(here + os.sep) else str(path)


def read_source(path: Path, report: Callable[[Fault], None]) -> Source:
    """Read a `.py` or `.toml` file. Raises ConfigError for one that is neither."""
    text = read_text(path)
    source = Source(shown_path(path), lines=text.encode("utf-8").split(b"\n"))
    if path.suffix == ".toml":
        read_toml(text, source, report)
    else:
        read_python(text, source, report)
    return source


def read_text(path: Path) -> str:
    """Return the text of a file. Raises ConfigError for what hinders."""
    place, data = shown_path(path), b""
    try:
        if path.suffix not in (".py", ".toml"):
            raise ValueError("the name of a configuration file must end in .py or .toml")
        data = read_small(path, MAX_SIZE)
        return data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError([Fault(f"{place}:{line}", "", "is not UTF-8 text", "save the file as UTF-8")]) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError([Fault(place, "", f"cannot be read ({reason})", "name a .py or .toml file")]) from None


def read_python(text: str, source: Source, report: Callable[[Fault], None]) -> None:
    """Take the assignments of a Python-syntax file. Raises ConfigError for a syntax error."""
    try:
        module = parse_python(text, "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None) or 1
        shown_line = source.lines[line - 1].decode() if line <= len(source.lines) else ""
        reason = getattr(error, "msg", None) or str(error) or "brackets or operators are nested too deeply"
        fault = Fault(f"{source.file}:{line}", shorten(shown_line), f"is not Python syntax ({reason})", "mend the line")
        raise ConfigError([fault]) from None
    for line in module.body:
        read_statement(line, source, report)


def parse_python(text: str, mode: str) -> Any:
    """Return the syntax tree of Python text, without the warnings that Python prints about odd literals."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text, mode=mode)


def read_statement(line: ast.stmt, source: Source, report: Callable[[Fault], None]) -> None:
    """Take one line of a Python-syntax file: assignments and free-standing text are known."""
    evaluator = Evaluator(source.file, source.lines, lookup=lambda name: None, known=list, report=report)
    origin = evaluator.origin(line)
    if isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) and isinstance(line.value.value, str):
        return
    if isinstance(line, ast.AnnAssign) and line.value is None:
        return
    targets = line.targets if isinstance(line, ast.Assign) else [line.target] if isinstance(line, ast.AnnAssign) else []
    value = line.value if isinstance(line, (ast.Assign, ast.AnnAssign)) else None
    names = [target.id for target in targets if isinstance(target, ast.Name)]
    try:
        if value is None or not names or len(names) != len(targets):
            evaluator.fault(line, "is not an assignment to a name", "write name = value")
        for name in names:
            if name == DELETE:
                evaluator.fault(line, "stands alone", f"{DELETE}=True belongs inside the dict that replaces its base")
            if name != BASE:
                source.statements.append(Statement(name, origin, expr=value))
                continue
            paths = evaluator.plain_value(value)
            try:
                add_bases(paths, origin, source)
            except ValueError as error:
                evaluator.fault(value, str(error))
    except Stop:
        source.broken.update(names)


def add_bases(paths: Any, origin: Origin, source: Source) -> None:
    """Take `_base_`: a path or a list of paths. Raises ValueError for anything else."""
    paths = [paths] if isinstance(paths, str) else paths
    if not isinstance(paths, (list, tuple)) or not all(isinstance(path, str) and path for path in paths):
        raise ValueError(f'{BASE} is not a path; write {BASE} = "x.py" or {BASE} = ["x.py", "y.py"]')
    if source.bases_origin is not None:
        raise ValueError(f"{BASE} is named twice; write one list: {BASE} = [...]")
    source.bases, source.bases_origin = list(paths), origin


def read_toml(text: str, source: Source, report: Callable[[Fault], None]) -> None:
    """Take the keys of a TOML file; messages name the file. Raises ConfigError for a syntax error."""
    origin = Origin(source.file)
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(placeholder_faults(source) or [toml_fault(error, source)]) from None
    for name, value in table.items():
        try:
            if name == BASE:
                add_bases(value, origin, source)
                continue
            if name.startswith("_"):
                raise ValueError("is no key: names that start with _ are the variables of Python files")
            if rule := size_fault(value):
                raise ValueError(rule)
            check_toml(value)
            source.statements.append(Statement(name, origin, node=grow(value, origin)))
        except ValueError as error:
            report(Fault(source.file, shown(value), str(error), "", name))
            source.broken.add(name)


def placeholder_faults(source: Source) -> list[Fault]:
    """Every `key = TODO` of a TOML file: published run files hold some, and TOML has no such value."""
    faults, table = [], ""
    for number, line in enumerate(source.lines, 1):
        text = line.decode()
        if header := re.match(r"\s*\[([\w.\- ]+)\]", text):
            table = header[1].strip() + "."
        elif entry := re.match(r"\s*([\w.\-]+)\s*=\s*TODO\s*(?:#.*)?$", text):
            fix = "write the value, or delete the line"
            faults.append(Fault(f"{source.file}:{number}", "TODO", "is a placeholder", fix, table + entry[1]))
    return faults


def toml_fault(error: Exception, source: Source) -> Fault:
    """Return the error of a TOML file, with the line that it names."""
    place, text = source.file, ""
    if match := re.search(r" \(at line (\d+), column \d+\)$", str(error)):
        place, text = f"{place}:{match[1]}", shorten(source.lines[int(match[1]) - 1].decode())
    return Fault(place, text, f"is not TOML ({error})", "text stands in quotes, tables in [brackets]")


def check_toml(value: Any) -> None:
    """Raise ValueError for a value of a TOML file that a configuration cannot hold."""
    if isinstance(value, (list, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            check_toml(part)
    elif rule := scalar_fault(value):
        raise ValueError(f"{rule}; write dates and the like as text in quotes")
