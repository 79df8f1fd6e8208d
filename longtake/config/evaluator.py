"""Values of Python expressions, worked out from their syntax tree by the rules below and never executed.

Known: text, whole and real numbers, True, False, None; dicts, lists and tuples, written as literals or as `dict(...)`,
`list(...)`, `tuple(...)`; `**name` and `*name` inside them; comprehensions; `name`, `name[key]`; + - * / // % ** on
numbers, + and * on text and lists. Everything has a bound, so that no expression runs long or fills the memory.
"""

from __future__ import annotations

import ast
import difflib
import math
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn

from longtake.config.faults import ConfigError, Fault, shorten, shown
from longtake.config.tree import Branch, Leaf, Node, Origin, branch, grow, plain

MAX_CELLS = 200_000  # values made while one configuration is read; well under a second of work
MAX_LEVELS = 50  # of dicts and lists within each other
MAX_BITS = 1_024  # of a whole number
CALLS = ("dict", "list", "tuple", "range")  # the functions there are, and names that cannot be assigned
ALLOWED = (
    "a configuration holds text, numbers, True, False, None, dict(), list(), tuple(), arithmetic and names from above"
)
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


class Budget:
    """What may still be spent on one configuration. One cell is one value made or copied, or 64 characters."""

    def __init__(self) -> None:
        self.cells = MAX_CELLS
        self.place = ""  # of the statement that is evaluated
        self.hints = 20  # near names that are looked up, at up to 50 ms each

    def take(self, cells: int = 1) -> None:
        """Takes what something costs before it is made. Raises ConfigError where there is not that much left."""
        self.cells -= cells
        if self.cells < 0:
            fix = f"a configuration has at most {MAX_CELLS:,} values"
            raise ConfigError([Fault(self.place, "", "is too large to evaluate", fix)])

    def weigh(self, value: Any) -> None:
        """Takes the cells of a value, each as often as it appears: a list that holds one list 1000 times has 1000 times
        its cells, although Python stores it once. Raises ConfigError also for a value of more than 50 levels."""
        stack = [(value, 0)]
        while stack:
            item, level = stack.pop()
            self.take(1 + len(item) // 64 if isinstance(item, str) else 1)
            if isinstance(item, Leaf):
                stack.append((item.value, level))
                continue
            parts = item.items if isinstance(item, Branch) else item
            if isinstance(parts, (dict, list, tuple)):
                if level >= MAX_LEVELS:
                    fix = f"a value has at most {MAX_LEVELS} levels"
                    raise ConfigError([Fault(self.place, "", "is nested too deeply", fix)])
                stack.extend((part, level + 1) for part in (parts.values() if isinstance(parts, dict) else parts))


@dataclass
class Evaluator:
    """Evaluates the expressions of one file."""

    file: str
    lines: list[bytes]  # its text, to show what is wrong
    lookup: Callable[[str], Node | None]  # the value of a name, None where there is none; or raises Stop
    known: Callable[[], Iterable[str]]  # the names there are, for suggestions
    budget: Budget
    report: Callable[[Fault], None]
    sources: dict[str, Origin] = field(default_factory=dict)  # the names that the value at hand was computed from

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
        outer, self.budget.place = self.budget.place, self.origin(expr).place
        try:
            result = self.node(expr, {})
            self.budget.weigh(result)
            return result
        finally:
            self.budget.place = outer

    def origin(self, expr: ast.AST) -> Origin:
        return Origin(f"{self.file}:{expr.lineno}")

    def fault(self, expr: ast.AST, rule: str, fix: str = "") -> NoReturn:
        """Report what is wrong with an expression, and give it up."""
        self.report(Fault(self.origin(expr).place, self.source(expr), rule, fix))
        raise Stop

    def source(self, expr: ast.AST) -> str:
        """The text of an expression, its first line at most."""
        line = self.lines[expr.lineno - 1] if expr.lineno <= len(self.lines) else b""  # flags have no lines
        end = expr.end_col_offset if expr.end_lineno == expr.lineno else len(line)
        return shorten(line[expr.col_offset : end][:400].decode("utf-8", "replace"))

    # Every method below takes an expression and the comprehension variables around it, and returns its value: a Branch
    # for a dict, plain data for everything else.

    def value(self, expr: ast.expr, local: dict[str, Any]) -> Any:
        self.budget.take()
        if type(expr) not in self.METHODS:
            self.fault(expr, "cannot stand in a configuration", ALLOWED)
        return self.METHODS[type(expr)](self, expr, local)

    def plain_value(self, expr: ast.expr, local: dict[str, Any], marks: bool = False) -> Any:
        """The value as plain data. `marks` keeps each `_delete_`: a dict in a list is laid over another one later."""
        value = self.value(expr, local)
        if not isinstance(value, Branch):
            return value
        self.budget.weigh(value)
        return plain(value, marks)

    def constant(self, expr: ast.Constant, local: dict[str, Any]) -> Any:
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
            self.budget.weigh(value)
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

    def mapping(self, expr: ast.Dict | ast.Call, local: dict[str, Any]) -> Branch:
        """A dict, as a literal or as `dict(...)`; every faulty entry is reported."""
        if isinstance(expr, ast.Dict):
            parts: list[tuple[ast.expr | str | None, ast.expr]] = list(zip(expr.keys, expr.values, strict=True))
        else:
            if len(expr.args) > 1:
                self.fault(expr, "takes at most one dict besides its keys", "write dict(name, key=value)")
            parts = [(None, argument) for argument in expr.args]
            parts += [(keyword.arg, keyword.value) for keyword in expr.keywords]
        items: list[tuple[object, Node]] = []
        failed = False
        for name, item in parts:
            try:
                if name is None:
                    items.extend(self.entries(item, local))
                    continue
                key = name if isinstance(name, str) else self.key(name, local)
                items.append((key, self.node(item, local)))
            except Stop:
                failed = True
        if failed:
            raise Stop
        return self.make_branch(expr, items)

    def key(self, expr: ast.expr, local: dict[str, Any]) -> str | int:
        key = self.plain_value(expr, local)
        if isinstance(key, bool) or not isinstance(key, (str, int)):
            self.fault(expr, "cannot be a key", "a key is text or a whole number")
        return key

    def make_branch(self, expr: ast.expr, items: list[tuple[object, Node]]) -> Branch:
        self.budget.take(len(items))
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
        self.budget.take(len(value))
        return value

    def range_call(self, expr: ast.Call, local: dict[str, Any]) -> range:
        bounds = [self.value(argument, local) for argument in expr.args]
        whole = all(isinstance(bound, int) and not isinstance(bound, bool) for bound in bounds)
        if expr.keywords or not 1 <= len(bounds) <= 3 or not whole or (len(bounds) == 3 and bounds[2] == 0):
            self.fault(expr, "is not a range", "write range(stop), range(start, stop) or range(start, stop, step)")
        numbers = range(*bounds)
        self.budget.take(len(numbers[: MAX_CELLS + 1]))  # the length of a longer one may be more than Python can say
        return numbers

    def call(self, expr: ast.Call, local: dict[str, Any]) -> Any:
        function = expr.func.id if isinstance(expr.func, ast.Name) else None
        if function == "dict":
            return self.mapping(expr, local)
        if function == "range":
            self.fault(expr, "stands outside of a comprehension, list(...) and tuple(...)", "write list(range(...))")
        if function not in ("list", "tuple"):
            self.fault(expr, "is a call, and a configuration is never executed", "dict(), list() and tuple() are known")
        if expr.keywords or len(expr.args) > 1:
            self.fault(expr, f"takes one list, tuple or range, as {function}(range(5))")
        values = self.series(expr.args[0], local) if expr.args else ()
        return list(values) if function == "list" else tuple(values)

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
            self.budget.take(1 + len(local))
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
        if type(expr.op) not in OPERATORS:
            self.fault(
                expr, "is no arithmetic", "the operators are " + " ".join(sign for sign, _ in OPERATORS.values())
            )
        symbol, function = OPERATORS[type(expr.op)]
        left, right = self.plain_value(expr.left, local), self.plain_value(expr.right, local)
        if is_number(left) and is_number(right):
            return self.arithmetic(expr, function, left, right)
        if symbol == "+" and type(left) is type(right) and isinstance(left, (str, list, tuple)):
            self.budget.take((len(left) + len(right)) // (64 if isinstance(left, str) else 1))
            return left + right
        if symbol == "*" and isinstance(right, (str, list, tuple)):
            left, right = right, left
        if symbol == "*" and isinstance(left, (str, list, tuple)) and type(right) is int:
            count = max(right, 0) if left else 0  # Python refuses a count that no index holds, even of nothing
            self.budget.take(len(left) * count // (64 if isinstance(left, str) else 1))
            return left * count
        kinds = f"{type(left).__name__} and {type(right).__name__}"
        self.fault(expr, f"cannot be computed: {symbol} of {kinds}", "take two numbers, or two values of one kind")

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
        """The value, if it is one that a configuration may hold."""
        if rule := scalar_fault(value):
            self.fault(expr, rule, ALLOWED)
        return value

    METHODS: ClassVar[dict[type[ast.expr], Callable[..., Any]]] = {
        ast.Constant: constant,
        ast.Name: name,
        ast.List: sequence,
        ast.Tuple: sequence,
        ast.Dict: mapping,
        ast.Call: call,
        ast.ListComp: comprehension,
        ast.DictComp: comprehension,
        ast.Subscript: subscript,
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
    return ""


def is_number(value: Any) -> bool:
    """Whether arithmetic applies: an int or a float, and not True or False."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
