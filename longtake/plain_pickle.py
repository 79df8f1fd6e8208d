"""Pickles of plain data, read by an interpreter that imports and calls nothing.

Work and memory are linear in the bytes read: sizes that a pickle states are not believed, nothing is copied more than
once, and keys are hashed that cannot nest or collide. Python's own unpickler allocates by such sizes, and calls what it
is allowed to import with any argument.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

_MAX_OPERATIONS = 10_000_000  # about 200,000 chunks of sharded tensors
_MAX_KEY = 2**60  # larger integers can be made to collide in a dict
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: dict[str, Callable[[], Any]] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple, "EMPTY_SET": list}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_IGNORED = frozenset({"PROTO", "FRAME"})
_LITERALS = (int, float, str, bytes, bytearray)


class MalformedPickle(ValueError):
    """Bytes that are not a pickle, or a pickle of more than plain data."""


class Global(NamedTuple):
    """The name of a class or function."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False)
class PickledCall:
    """An object that a pickle describes and nobody makes: the function, its arguments, and the state set afterwards."""

    function: Global | PickledCall
    args: tuple[Any, ...]
    state: Any = None


class Stream(Protocol):
    """Input of a pickle: reads return no more than the stream holds, and allocate no more."""

    def read(self, size: int, /) -> bytes: ...

    def readline(self) -> bytes: ...

    def tell(self) -> int: ...


def read_pickle(
    stream: Stream,
    call: Callable[[Global, tuple[Any, ...]], Any] = PickledCall,
    stored: Callable[[Any], Any] | None = None,
    check: Callable[[Global], None] = lambda name: None,
) -> Any:
    """Return the value of the pickle that begins at the stream's position, which is behind it afterwards.

    `call` makes an object of a function's name and its arguments; `stored` one of a persistent id; `check` sees
    every name; they may raise classes of `MalformedPickle`, as this does. Dicts of any class are dicts, sets are lists.
    """
    reader = _PickleReader(call, stored, check)
    try:
        for opcode, argument in _operations(stream):
            if opcode == "STOP":
                return reader.pop()
            reader.run(opcode, argument)
    except MalformedPickle:
        raise
    except Exception as error:  # whatever the stack is short of
        raise MalformedPickle(f"not a pickle of plain data ({type(error).__name__}: {error})") from None
    raise MalformedPickle("it ends early")


def _operations(stream: Stream) -> Iterator[tuple[str, Any]]:
    for count, (opcode, argument, _) in enumerate(pickletools.genops(stream)):
        if count == _MAX_OPERATIONS:
            raise MalformedPickle(f"it has more than {_MAX_OPERATIONS:,} operations")
        yield opcode.name, argument


class _PickleReader:
    def __init__(
        self,
        call: Callable[[Global, tuple[Any, ...]], Any],
        stored: Callable[[Any], Any] | None,
        check: Callable[[Global], None],
    ) -> None:
        self.call, self.stored, self.check = call, stored, check
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def pop(self) -> Any:
        if self.marks and self.marks[-1] == len(self.stack):
            raise MalformedPickle("its stack is empty")
        return self.stack.pop()

    def since_mark(self) -> list[Any]:
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def run(self, opcode: str, argument: Any) -> None:
        stack = self.stack
        if opcode in _IGNORED:
            return
        if opcode in ("MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"):
            self.memo[len(self.memo) if opcode == "MEMOIZE" else argument] = stack[-1]
        elif opcode in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(self.memo[argument])
        elif opcode in _CONSTANTS:
            stack.append(_CONSTANTS[opcode])
        elif opcode in _EMPTY:
            stack.append(_EMPTY[opcode]())
        elif opcode == "MARK":
            self.marks.append(len(stack))
        elif opcode == "POP":
            stack.pop() if not self.marks or self.marks[-1] < len(stack) else self.marks.pop()
        elif opcode == "POP_MARK":
            self.since_mark()
        elif opcode == "DUP":
            stack.append(stack[-1])
        elif opcode in _TUPLES:
            count = _TUPLES[opcode]
            stack[-count:] = [tuple(stack[-count:])]
        elif opcode in ("TUPLE", "LIST", "FROZENSET"):
            items = self.since_mark()
            stack.append(items if opcode == "LIST" else tuple(items))
        elif opcode in ("APPEND", "APPENDS", "ADDITEMS"):
            items = [self.pop()] if opcode == "APPEND" else self.since_mark()
            _extend(stack[-1], items)
        elif opcode in ("SETITEM", "SETITEMS", "DICT"):
            items = [self.pop(), self.pop()][::-1] if opcode == "SETITEM" else self.since_mark()
            if opcode == "DICT":
                stack.append({})
            _update(stack[-1], items)
        elif opcode in ("BINPERSID", "PERSID"):
            self.load_stored(self.pop() if opcode == "BINPERSID" else argument)
        elif argument is not None and isinstance(argument, _LITERALS) and opcode not in ("GLOBAL", "INST", "EXT1"):
            stack.append(argument)
        else:
            self.make(opcode, argument)

    def load_stored(self, key: Any) -> None:
        if self.stored is None:
            raise MalformedPickle("it refers to objects outside itself")
        self.stack.append(self.stored(key))

    def make(self, opcode: str, argument: Any) -> None:
        """Execute an operation that names classes and functions, or makes objects of them."""
        if opcode == "GLOBAL":
            self.stack.append(self.named(*argument.split(" ", 1)))
        elif opcode == "STACK_GLOBAL":
            name, module = self.pop(), self.pop()
            self.stack.append(self.named(module, name))
        elif opcode in ("REDUCE", "NEWOBJ"):
            args, function = self.pop(), self.pop()
            self.stack.append(self.apply(function, args))
        elif opcode == "NEWOBJ_EX":
            named, args, function = self.pop(), self.pop(), self.pop()
            self.stack.append(self.apply(function, (*args, named)))
        elif opcode in ("INST", "OBJ"):
            args = self.since_mark()
            function = self.named(*argument.split(" ", 1)) if opcode == "INST" else args.pop(0)
            self.stack.append(self.apply(function, tuple(args)))
        elif opcode == "BUILD":
            state = self.pop()
            if isinstance(self.stack[-1], PickledCall):
                self.stack[-1].state = state
        else:
            raise MalformedPickle(f"it holds {opcode.lower()}, expected plain data")

    def named(self, module: Any, name: Any) -> Global:
        if not isinstance(module, str) or not isinstance(name, str):
            raise MalformedPickle("it names a function by something other than text")
        self.check(found := Global(module, name))
        return found

    def apply(self, function: Any, args: Any) -> Any:
        if not isinstance(function, Global | PickledCall) or not isinstance(args, tuple):
            raise MalformedPickle("it calls what is not a function")
        if isinstance(function, PickledCall):  # such as a method
            return PickledCall(function, args)
        if function == ("collections", "OrderedDict") and not args:
            return {}
        return self.call(function, args)


def _extend(target: Any, items: list[Any]) -> None:
    if isinstance(target, list):
        target.extend(items)
    elif not isinstance(target, PickledCall):
        raise MalformedPickle(f"it appends to a value of type {type(target).__name__}")


def _update(target: Any, items: list[Any]) -> None:
    if isinstance(target, PickledCall):
        return
    if not isinstance(target, dict) or len(items) % 2:
        raise MalformedPickle(f"it sets items of a value of type {type(target).__name__}")
    for key, value in zip(items[::2], items[1::2], strict=True):
        if not (_is_key(key) or (isinstance(key, tuple) and len(key) <= 16 and all(map(_is_key, key)))):
            raise MalformedPickle(f"a key of a dict has the type {type(key).__name__}")
        target[key] = value


def _is_key(value: Any) -> bool:
    if isinstance(value, int):
        return abs(value) < _MAX_KEY
    return value is None or isinstance(value, str | bytes | float | PickledCall | Global)
