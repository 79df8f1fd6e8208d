"""Values of Python expressions, computed from their syntax tree and never executed.

Known: text, whole and real numbers, True, False, None; dicts, lists and tuples, with `dict(key=value)` and `**name`;
names; + - * / // % ** on numbers, + and * on text and lists.
"""

from __future__ import annotations

import ast
import difflib
import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn

from longtake.config.faults import Fault, shorten
from longtake.config.tree import Branch, Leaf, Node, Origin, branch, plain
from longtake.small_files import is_unicode

MAX_SIZE = 250_000  # entries and characters of one value, and bytes of a file
MAX_LEVELS = 50  # of dicts and lists within each other
MAX_BITS = 1_024  # of a whole number
ALLOWED = "write text, numbers, True, False, None, dicts, lists, tuples, arithmetic or names from above"
OPERATORS: dict[type[ast.operator], tuple[str, Callable[[Any, Any], Any]]] = {
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("*", operator.mul),
    ast.Div: ("/", operator.truediv),
    ast.FloorDiv: ("//", operator.floordiv),
    ast.Mod: ("%", operator.mod),
    ast.Pow: ("**", operator.pow),
}


class Stop(Exception):
    """This expression has no value; the reason has been reported."""


def size_fault(value: Any) -> str:
    """Why a value is too large or too deep; empty where it is not. What a list holds twice is counted twice, although
    Python stores it once."""
    size, stack = 0, [(value, 0)]
    while stack:
        item, level = stack.pop()
        size += 1 + len(item) if isinstance(item, str) else 1
        if size > MAX_SIZE:
            return f"is too large: a value has at most {MAX_SIZE:,} entries and characters"
        if level > MAX_LEVELS:
            return f"is nested too deeply: a value has at most {MAX_LEVELS} levels"
        if isinstance(item, Leaf):
            stack.append((item.value, level))
        elif isinstance(item, (list, tuple)):
            stack.extend((entry, level + 1) for entry in item)
        elif isinstance(item, (dict, Branch)):
            entries = item.items if isinstance(item, Branch) else item
            stack.extend((entry, level + 1) for entry in entries.values())
    return ""


@dataclass
class Evaluator:
    """Evaluates the expressions of one file."""

    file: str
    lines: list[bytes]  # its text, to show what is wrong
    lookup: Callable[[str], Node | None]  # the value of a name, None where there is none; or raises Stop
    known: Callable[[], Iterable[str]]  # the names there are, for suggestions
    report: Callable[[Fault], None]
    sources: dict[str, Origin] = field(default_factory=dict)  # names that the current value was computed from

    def node(self, expr: ast.expr) -> Node:
        """Return the tree of an expression. Raises Stop after reporting every fault in it."""
        outer, self.sources = self.sources, {}
        try:
            value = self.value(expr)
            return value if isinstance(value, Branch) else Leaf(value, self.origin(expr).derived(self.sources))
        finally:
            self.sources = outer | self.sources

    def statement(self, expr: ast.expr) -> Node:
        """Return the tree of the right side of an assignment, whose size is checked. Raises Stop like `node`."""
        result = self.node(expr)
        if rule := size_fault(result):
            self.fault(expr, rule)
        return result

    def origin(self, expr: ast.expr | ast.stmt) -> Origin:
        return Origin(f"{self.file}:{expr.lineno}")

    def fault(self, expr: ast.expr | ast.stmt, rule: str, fix: str = "") -> NoReturn:
        """Report what is wrong with an expression, and stop its evaluation."""
        self.report(Fault(self.origin(expr).place, self.source(expr), rule, fix))
        raise Stop

    def source(self, expr: ast.expr | ast.stmt) -> str:
        """Return the text of an expression, its first line at most."""
        line = self.lines[expr.lineno - 1] if expr.lineno <= len(self.lines) else b""  # flags have no lines
        end = expr.end_col_offset if expr.end_lineno == expr.lineno else len(line)
        return shorten(line[expr.col_offset : end][:400].decode("utf-8", "replace"))

    # Every method below takes an expression and returns its value: a Branch for a dict, plain data for everything else.

    def value(self, expr: ast.expr) -> Any:
        if type(expr) not in self.METHODS:
            self.fault(expr, "cannot stand in a configuration", ALLOWED)
        return self.METHODS[type(expr)](self, expr)

    def plain_value(self, expr: ast.expr) -> Any:
        """Return the value as plain data, with its `_delete_`: a dict in a list may be laid over another one later."""
        value = self.value(expr)
        return plain(value, marks=True) if isinstance(value, Branch) else value

    def constant(self, expr: ast.Constant) -> Any:
        return self.bounded(expr, expr.value)

    def name(self, expr: ast.Name) -> Any:
        node = self.lookup(expr.id)
        if node is None:
            near = difflib.get_close_matches(expr.id, self.known(), n=1, cutoff=0.6)
            hint = f"did you mean {near[0]}?" if near else "text stands in quotes"
            self.fault(expr, "is not defined above or in a base", hint)
        if isinstance(node, Leaf):
            self.sources[expr.id] = node.origin
            return node.value
        return node

    def sequence(self, expr: ast.List | ast.Tuple) -> list[Any] | tuple[Any, ...]:
        values = [self.plain_value(item) for item in expr.elts]
        return values if isinstance(expr, ast.List) else tuple(values)

    def call(self, expr: ast.Call) -> Branch:
        """`dict(...)`, the only call there is."""
        if not isinstance(expr.func, ast.Name) or expr.func.id != "dict":
            self.fault(expr, "is a call, and a configuration is never executed", "only dict(key=value) is known")
        if len(expr.args) > 1:
            self.fault(expr, "takes at most one dict besides its keys", "write dict(name, key=value)")
        unpacked: list[tuple[str | None, ast.expr]] = [(None, argument) for argument in expr.args]
        return self.mapping(expr, unpacked + [(keyword.arg, keyword.value) for keyword in expr.keywords])

    def braces(self, expr: ast.Dict) -> Branch:
        return self.mapping(expr, list(zip(expr.keys, expr.values, strict=True)))

    def mapping(self, expr: ast.expr, parts: list[tuple[Any, ast.expr]]) -> Branch:
        """Return a dict of (key, value), or (None, dict to unpack); every faulty entry is reported."""
        items: list[tuple[object, Node]] = []
        failed = False
        for key, item in parts:
            try:
                if key is None:
                    items += self.entries(item)
                else:
                    items.append((key if isinstance(key, str) else self.key(key), self.node(item)))
            except Stop:
                failed = True
        if failed:
            raise Stop
        try:
            return branch(items, self.origin(expr))
        except ValueError as error:
            self.fault(expr, str(error))

    def key(self, expr: ast.expr) -> str | int:
        key = self.value(expr)
        if isinstance(key, bool) or not isinstance(key, (str, int)):
            self.fault(expr, "cannot be a key", "a key is text or a whole number")
        return key

    def entries(self, expr: ast.expr) -> list[tuple[object, Node]]:
        """Return the entries of a dict that is unpacked or copied."""
        value = self.value(expr)
        if not isinstance(value, Branch):
            self.fault(expr, "is not a dict", "only a dict can be unpacked into a dict")
        return list(value.items.items())

    def unary(self, expr: ast.UnaryOp) -> Any:
        if not isinstance(expr.op, (ast.UAdd, ast.USub)):
            self.fault(expr, "is not arithmetic", "the signs are + and -")
        value = self.value(expr.operand)
        if not is_number(value):
            self.fault(expr, "is not a number", "a sign stands before a number")
        return -value if isinstance(expr.op, ast.USub) else value

    def binary(self, expr: ast.BinOp) -> Any:
        if type(expr.op) not in OPERATORS:
            signs = " ".join(sign for sign, _ in OPERATORS.values())
            self.fault(expr, "is not arithmetic", f"the operators are {signs}")
        symbol, function = OPERATORS[type(expr.op)]
        left, right = self.plain_value(expr.left), self.plain_value(expr.right)
        if is_number(left) and is_number(right):
            return self.arithmetic(expr, function, left, right)
        if symbol == "*" and isinstance(right, (str, list, tuple)):
            left, right = right, left
        if symbol == "+" and type(left) is type(right) and isinstance(left, (str, list, tuple)):
            size = len(left) + len(right)
        elif symbol == "*" and isinstance(left, (str, list, tuple)) and type(right) is int:
            size = max(len(left), 1) * abs(right)
        else:
            kinds = f"{type(left).__name__} and {type(right).__name__}"
            self.fault(expr, f"cannot be computed: {symbol} of {kinds}", "take two numbers, or two values of one kind")
        if size > MAX_SIZE:
            self.fault(expr, f"is too large: a value has at most {MAX_SIZE:,} entries and characters")
        return function(left, right)

    def arithmetic(self, expr: ast.BinOp, function: Callable[[Any, Any], Any], left: Any, right: Any) -> int | float:
        whole = isinstance(left, int) and isinstance(right, int)
        if function is operator.pow and whole and left.bit_length() * max(right, 0) > 2 * MAX_BITS:
            self.fault(expr, "is too large a number", f"whole numbers have at most {MAX_BITS} bits")
        try:
            return self.bounded(expr, function(left, right))
        except ZeroDivisionError:
            self.fault(expr, "divides by zero")
        except OverflowError:
            self.fault(expr, "is too large a number")

    def bounded(self, expr: ast.expr, value: Any) -> Any:
        """Return the value, if it is one that a configuration may hold."""
        if rule := scalar_fault(value):
            self.fault(expr, rule, ALLOWED)
        return value

    METHODS: ClassVar[dict[type[ast.expr], Callable[..., Any]]] = {
        ast.Constant: constant,
        ast.Name: name,
        ast.List: sequence,
        ast.Tuple: sequence,
        ast.Dict: braces,
        ast.Call: call,
        ast.UnaryOp: unary,
        ast.BinOp: binary,
    }


def scalar_fault(value: Any) -> str:
    """What hinders that a configuration holds this single value; empty where nothing does."""
    if value is not None and not isinstance(value, (str, int, float)):
        return "is not a value of a configuration"
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        return f"is too large a number: whole numbers have at most {MAX_BITS} bits"
    if isinstance(value, float) and not math.isfinite(value):
        return "is not a finite number"
    if isinstance(value, str) and ("\0" in value or not is_unicode(value)):
        return "has a NUL character or half a character, which no file can hold"
    return ""


def is_number(value: Any) -> bool:
    """Whether arithmetic applies: an int or a float, and not True or False."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
