"""Values of Python expressions, worked out from their syntax tree by the rules below and never executed.

Known: text, whole and real numbers, True, False, None; dicts, lists and tuples, written as literals or as `dict(...)`,
`list(...)`, `tuple(...)`; `**name` and `*name` inside them; comprehensions; `name`, `name[key]`; + - * / // % ** on
numbers, + and * on text and lists. Everything has a bound, so that no expression runs long or fills the memory.
"""

from __future__ import annotations

import ast
import difflib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, NoReturn

from longtake.config.faults import Fault, shorten, shown
from longtake.config.tree import Branch, Leaf, Node, Origin, branch, grow, plain

MAX_CELLS = 200_000  # values made while one configuration is read; well under a second of work
MAX_TEXT = 200_000  # characters of a text that is put together
MAX_ITEMS = 20_000  # entries of a list or range
MAX_LEVELS = 50  # of dicts and lists within each other
MAX_BITS = 1_024  # of a whole number
CALLS = ("dict", "list", "tuple", "range")  # the functions there are, and names that cannot be assigned
ALLOWED = (
    "a configuration holds text, numbers, True, False, None, dict(), list(), tuple(), arithmetic and names from above"
)
OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**"}
ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "**": lambda a, b: a**b,
}


class Stop(Exception):
    """This expression has no value; the reason has been reported."""


class Budget:
    """What may still be spent on one configuration. One cell is one value made or copied, or 64 characters."""

    def __init__(self, cells: int = MAX_CELLS) -> None:
        self.cells = cells
        self.overdrawn = False  # whether it has been reported that nothing is left
        self.hints = 20  # near names that are looked up, at up to 50 ms each

    def take(self, cells: int) -> bool:
        """Whether there was that much left; takes it."""
        self.cells -= cells
        return self.cells >= 0

    def weigh(self, value: Any) -> bool:
        """Take the cells of a value, each as often as it appears: a list that holds one list 1000 times has 1000 times
        its cells, although Python stores it once. False also for a value of more than 50 levels."""
        stack = [(value, 0)]
        while stack and self.cells >= 0:
            item, level = stack.pop()
            self.cells -= 1 + len(item) // 64 if isinstance(item, str) else 1
            if isinstance(item, Branch):
                item = item.items
            if isinstance(item, Leaf):
                stack.append((item.value, level))
            elif isinstance(item, (dict, list, tuple)):
                if level >= MAX_LEVELS:
                    return False
                stack.extend((part, level + 1) for part in (item.values() if isinstance(item, dict) else item))
        return self.cells >= 0


class Evaluator:
    """Evaluates the expressions of one file.

    `lines` is the file's text, for showing what is wrong; `lookup(name)` gives the value of a name, None where there is
    none, or raises Stop; `known()` lists the names there are, for suggestions.
    """

    def __init__(
        self,
        file: str,
        lines: list[bytes],
        lookup: Callable[[str], Node | None],
        known: Callable[[], Iterable[str]],
        budget: Budget,
        report: Callable[[Fault], None],
    ) -> None:
        self.file, self.lines, self.lookup, self.known = file, lines, lookup, known
        self.budget, self.report = budget, report
        self.sources: dict[str, Origin] = {}  # the names that the value at hand was computed from

    def node(self, expr: ast.expr, local: dict[str, Any]) -> Node:
        """The tree of an expression. Raises Stop after reporting every fault in it."""
        outer, self.sources = self.sources, {}
        try:
            value = self.value(expr, local)
            return value if isinstance(value, Branch) else Leaf(value, self.origin(expr).derived(self.sources))
        finally:
            self.sources = outer | self.sources

    def statement(self, expr: ast.expr) -> Node:
        """The tree of the right side of an assignment; also bounds how large it is. Raises Stop like `node`."""
        result = self.node(expr, {})
        if not self.budget.weigh(result):
            self.too_large(expr)
        return result

    def origin(self, expr: ast.AST) -> Origin:
        """The line an expression starts on."""
        return Origin(f"{self.file}:{getattr(expr, 'lineno', 1)}")

    def fault(self, expr: ast.AST, rule: str, fix: str = "") -> NoReturn:
        """Report what is wrong with an expression, and give it up."""
        self.report(Fault(self.origin(expr).place, self.source(expr), rule, fix))
        raise Stop

    def too_large(self, expr: ast.AST) -> NoReturn:
        """Give an expression up for which the budget has no room; that the budget is spent is reported once."""
        if self.budget.cells >= 0:
            self.fault(expr, "is nested too deeply", f"a value has at most {MAX_LEVELS} levels")
        if self.budget.overdrawn:
            raise Stop
        self.budget.overdrawn = True
        self.fault(expr, "is too large to evaluate", f"a configuration has at most {MAX_CELLS:,} values")

    def source(self, expr: ast.AST) -> str:
        """The text of an expression, its first line at most."""
        line = self.lines[expr.lineno - 1] if 0 < getattr(expr, "lineno", 0) <= len(self.lines) else b""
        end = expr.end_col_offset if getattr(expr, "end_lineno", 0) == getattr(expr, "lineno", -1) else len(line)
        text = line[getattr(expr, "col_offset", 0) : end][:400].decode("utf-8", "replace")
        return shorten(text)

    # Every method below takes an expression and the comprehension variables around it, and returns its value: a Branch
    # for a dict, plain data for everything else.

    def value(self, expr: ast.expr, local: dict[str, Any]) -> Any:
        """The value of any expression: a Branch for a dict, plain data for everything else."""
        if not self.budget.take(1):
            self.too_large(expr)
        method = self.METHODS.get(type(expr))
        if method is None:
            self.fault(expr, "cannot stand in a configuration", ALLOWED)
        return method(self, expr, local)

    def plain_value(self, expr: ast.expr, local: dict[str, Any], marks: bool = False) -> Any:
        """The value as plain data. `marks` keeps each `_delete_`: a dict in a list is laid over another one later."""
        value = self.value(expr, local)
        if not isinstance(value, Branch):
            return value
        if not self.budget.weigh(value):
            self.too_large(expr)
        return plain(value, marks)

    def constant(self, expr: ast.Constant, local: dict[str, Any]) -> Any:
        if expr.value is not None and not isinstance(expr.value, (str, int, float)):
            self.fault(expr, "is not a value of a configuration", ALLOWED)
        return self.bounded(expr, expr.value)

    def name(self, expr: ast.Name, local: dict[str, Any]) -> Any:
        if expr.id in local:
            return self.of_data(expr, local[expr.id])
        node = self.lookup(expr.id)
        if node is None:
            if expr.id in CALLS:
                self.fault(expr, "is a function, not a value", f"write {expr.id}(...)")
            self.budget.hints -= 1
            names = list(self.known())[:1000] if self.budget.hints >= 0 else []
            near = difflib.get_close_matches(expr.id, names, n=1, cutoff=0.6)
            hint = f"did you mean {near[0]}?" if near else "text stands in quotes"
            self.fault(expr, "is not defined above or in a base", hint)
        if isinstance(node, Leaf):
            self.sources[expr.id] = node.origin
            return node.value
        return node

    def of_data(self, expr: ast.expr, value: Any) -> Any:
        """Plain data in the form of a value: a dict becomes a Branch."""
        if isinstance(value, dict):
            if not self.budget.weigh(value):
                self.too_large(expr)
            return grow(value, self.origin(expr))
        return value

    def sequence(self, expr: ast.List | ast.Tuple, local: dict[str, Any]) -> list[Any] | tuple[Any, ...]:
        values: list[Any] = []
        for item in expr.elts:
            if isinstance(item, ast.Starred):
                values.extend(self.series(item.value, local))
            else:
                values.append(self.plain_value(item, local, marks=True))
        return values if isinstance(expr, ast.List) else tuple(values)

    def dict_literal(self, expr: ast.Dict, local: dict[str, Any]) -> Branch:
        items: list[tuple[object, Node]] = []
        written: set[object] = set()
        failed = False
        for key_expr, item in zip(expr.keys, expr.values, strict=True):
            try:
                if key_expr is None:
                    items.extend(self.entries(item, local))
                    continue
                key = self.key(key_expr, local)
                if key in written:
                    self.fault(key_expr, "is a key of this dict already", "keep one of the two")
                written.add(key)
                items.append((key, self.node(item, local)))
            except Stop:
                failed = True
        return self.make_branch(expr, items, failed)

    def key(self, expr: ast.expr, local: dict[str, Any]) -> str | int:
        key = self.plain_value(expr, local)
        if isinstance(key, bool) or not isinstance(key, (str, int)):
            self.fault(expr, "cannot be a key", "a key is text or a whole number")
        return key

    def make_branch(self, expr: ast.expr, items: list[tuple[object, Node]], failed: bool = False) -> Branch:
        if failed:
            raise Stop
        if not self.budget.take(len(items)):
            self.too_large(expr)
        try:
            return branch(items, self.origin(expr))
        except ValueError as error:
            self.fault(expr, str(error))

    def entries(self, expr: ast.expr, local: dict[str, Any]) -> list[tuple[object, Node]]:
        """The entries of a dict that is unpacked or copied."""
        value = self.value(expr, local)
        if not isinstance(value, Branch):
            self.fault(expr, "is not a dict", "only a dict can be unpacked into a dict")
        return list(value.items.items())

    def series(self, expr: ast.expr, local: dict[str, Any]) -> list[Any] | tuple[Any, ...] | range:
        """The values that an unpacking or a comprehension runs over."""
        if isinstance(expr, ast.Call) and isinstance(expr.func, ast.Name) and expr.func.id == "range":
            return self.range_call(expr, local)
        value = self.value(expr, local)
        if not isinstance(value, (list, tuple)):
            self.fault(expr, "is not a list", "write a list, a tuple or range(...)")
        if not self.budget.take(len(value)):
            self.too_large(expr)
        return value

    def range_call(self, expr: ast.Call, local: dict[str, Any]) -> range:
        bounds = [self.value(argument, local) for argument in expr.args]
        whole = all(isinstance(bound, int) and not isinstance(bound, bool) for bound in bounds)
        if expr.keywords or not 1 <= len(bounds) <= 3 or not whole or (len(bounds) == 3 and bounds[2] == 0):
            self.fault(expr, "is not a range", "write range(stop), range(start, stop) or range(start, stop, step)")
        try:
            length = len(range(*bounds))
        except OverflowError:
            length = MAX_ITEMS + 1
        if length > MAX_ITEMS or not self.budget.take(length):
            self.fault(expr, "is too long", f"a range has at most {MAX_ITEMS:,} numbers")
        return range(*bounds)

    def call(self, expr: ast.Call, local: dict[str, Any]) -> Any:
        function = expr.func.id if isinstance(expr.func, ast.Name) else None
        if function == "dict":
            return self.dict_call(expr, local)
        if function == "range":
            self.fault(
                expr, "can only stand in a comprehension, list(...) or tuple(...)", f"write list({self.source(expr)})"
            )
        if function not in ("list", "tuple"):
            self.fault(
                expr, "is a call, and a configuration is never executed", "only dict(), list() and tuple() are known"
            )
        if expr.keywords or len(expr.args) > 1:
            self.fault(
                expr, f"takes one list, tuple or range, as {function}(range(5))", f"or write the {function} in brackets"
            )
        values = self.series(expr.args[0], local) if expr.args else ()
        return list(values) if function == "list" else tuple(values)

    def dict_call(self, expr: ast.Call, local: dict[str, Any]) -> Branch:
        items: list[tuple[object, Node]] = []
        failed = len(expr.args) > 1
        if failed:
            self.fault(expr, "takes at most one dict besides its keys", "write dict(name, key=value)")
        for argument in expr.args:
            items.extend(self.entries(argument, local))
        for keyword in expr.keywords:
            try:
                if keyword.arg is None:
                    items.extend(self.entries(keyword.value, local))
                else:
                    items.append((keyword.arg, self.node(keyword.value, local)))
            except Stop:
                failed = True
        return self.make_branch(expr, items, failed)

    def comprehension(self, expr: ast.ListComp | ast.DictComp, local: dict[str, Any]) -> Any:
        scopes = self.scopes(expr.generators, local)
        if isinstance(expr, ast.ListComp):
            return [self.plain_value(expr.elt, scope, marks=True) for scope in scopes]
        return self.make_branch(expr, [(self.key(expr.key, scope), self.node(expr.value, scope)) for scope in scopes])

    def scopes(self, loops: list[ast.comprehension], local: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The variables of each turn of nested loops."""
        if not loops:
            yield local
            return
        loop, *inner = loops
        if loop.ifs or loop.is_async or not isinstance(loop.target, ast.Name):
            self.fault(loop.target, "is not a loop that is known here", "write `for name in ...`, without `if`")
        for value in self.series(loop.iter, local):
            if not self.budget.take(1 + len(local)):
                self.too_large(loop.target)
            yield from self.scopes(inner, {**local, loop.target.id: value})

    def subscript(self, expr: ast.Subscript, local: dict[str, Any]) -> Any:
        if isinstance(expr.slice, ast.Slice):
            self.fault(expr, "takes a part of a list", "slices are not known; write the part itself")
        holder = self.value(expr.value, local)
        index = self.plain_value(expr.slice, local)
        if isinstance(holder, Branch):
            if isinstance(index, bool) or not isinstance(index, (str, int)) or index not in holder.items:
                keys = ", ".join(shown(key) for key in list(holder.items)[:12])
                self.fault(
                    expr, f"the dict has no key {shown(index)}", f"its keys are {keys}" if keys else "it is empty"
                )
            item = holder.items[index]
            if isinstance(item, Leaf):
                self.sources[self.source(expr)] = item.origin
                return item.value
            return item
        if not isinstance(holder, (list, tuple)):
            self.fault(expr, "only an entry of a dict, a list or a tuple can be taken")
        if isinstance(index, bool) or not isinstance(index, int) or not -len(holder) <= index < len(holder):
            self.fault(expr, f"there is no entry {shown(index)}", f"the list has {len(holder)} entries")
        return self.of_data(expr, holder[index])

    def unary(self, expr: ast.UnaryOp, local: dict[str, Any]) -> Any:
        if not isinstance(expr.op, (ast.UAdd, ast.USub)):
            self.fault(expr, "is no arithmetic", "the signs are + and -")
        value = self.plain_value(expr.operand, local)
        if not is_number(value):
            self.fault(expr, "is no number", "a sign stands before a number")
        return -value if isinstance(expr.op, ast.USub) else value

    def binary(self, expr: ast.BinOp, local: dict[str, Any]) -> Any:
        symbol = OPERATORS.get(type(expr.op))
        if symbol is None:
            self.fault(expr, "is no arithmetic", "the operators are " + " ".join(ARITHMETIC))
        left, right = self.plain_value(expr.left, local), self.plain_value(expr.right, local)
        if is_number(left) and is_number(right):
            return self.arithmetic(expr, symbol, left, right)
        if symbol == "+" and type(left) is type(right) and isinstance(left, (str, list, tuple)):
            self.bound_length(expr, left, len(left) + len(right))
            return left + right
        if symbol == "*" and isinstance(right, (str, list, tuple)):
            left, right = right, left
        if symbol == "*" and isinstance(left, (str, list, tuple)) and type(right) is int:
            self.bound_length(expr, left, len(left) * max(right, 0))
            return left * right
        kinds = f"{type(left).__name__} and {type(right).__name__}"
        self.fault(expr, f"cannot be computed: {symbol} of {kinds}", "take two numbers, or two values of one kind")

    def arithmetic(self, expr: ast.BinOp, symbol: str, left: int | float, right: int | float) -> int | float:
        whole = isinstance(left, int) and isinstance(right, int)
        if symbol == "**" and whole and left.bit_length() * max(right, 0) > 2 * MAX_BITS:
            self.fault(expr, "is too large a number", f"whole numbers have at most {MAX_BITS} bits")
        try:
            return self.bounded(expr, ARITHMETIC[symbol](left, right))
        except ZeroDivisionError:
            self.fault(expr, "divides by zero")
        except OverflowError:
            self.fault(expr, "is too large a number")

    def bounded(self, expr: ast.expr, value: Any) -> Any:
        """The value, if it is not a number beyond all use."""
        if isinstance(value, int) and value.bit_length() > MAX_BITS:
            self.fault(expr, "is too large a number", f"whole numbers have at most {MAX_BITS} bits")
        if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
            self.fault(expr, "is not a finite real number")
        return value

    def bound_length(self, expr: ast.expr, kind: str | list[Any] | tuple[Any, ...], length: int) -> None:
        limit, unit = (MAX_TEXT, "characters") if isinstance(kind, str) else (MAX_ITEMS, "entries")
        if length > limit:
            self.fault(expr, "is too long", f"it may have {limit:,} {unit}")
        if not self.budget.take(length // 64 if isinstance(kind, str) else length):
            self.too_large(expr)

    METHODS: ClassVar[dict[type[ast.expr], Callable[..., Any]]] = {
        ast.Constant: constant,
        ast.Name: name,
        ast.List: sequence,
        ast.Tuple: sequence,
        ast.Dict: dict_literal,
        ast.Call: call,
        ast.ListComp: comprehension,
        ast.DictComp: comprehension,
        ast.Subscript: subscript,
        ast.UnaryOp: unary,
        ast.BinOp: binary,
    }


def is_number(value: Any) -> bool:
    """Whether arithmetic applies: an int or a float, and not True or False."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
