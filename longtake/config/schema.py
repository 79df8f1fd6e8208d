"""What a schema says about a place in the tree, for hints and for flags: the names there are, the values that fit.

A schema is a `Section`, or any type pydantic checks. A *form* is one of the types a place may have, unions taken apart.
"""

from __future__ import annotations

import difflib
import enum
import types
import typing
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import PurePath
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from longtake.config.tree import Branch, Key, KeyPath, Leaf, Node, dotted, matching_key, number_key

SCALARS: dict[Any, str] = {bool: "bool", int: "int", float: "float", str: "text", type(None): "none"}
MAX_NAMES = 12  # valid names that a fix lists


def forms(annotation: Any) -> tuple[Any, ...]:
    """The types an annotation allows: unions, aliases and Annotated taken apart."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return forms(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return tuple(form for member in typing.get_args(annotation) for form in forms(member))
    if hasattr(annotation, "__value__"):  # type X = ...
        return forms(annotation.__value__)
    if annotation is None:
        return (type(None),)
    return (annotation,)


def is_section(form: Any) -> bool:
    """Whether a form has named fields."""
    return isinstance(form, type) and issubclass(form, BaseModel)


def fields(form: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields of a section by the names a user writes."""
    return {field.alias or name: field for name, field in form.model_fields.items()}


def below(form: Any, key: Key) -> tuple[Any, ...]:
    """The forms of the entry `key` of a value of this form; none where it can have no such entry."""
    if is_section(form):
        field = fields(form).get(str(key))
        return () if field is None else forms(field.annotation)
    origin, arguments = typing.get_origin(form) or form, typing.get_args(form)
    if origin is Any:
        return (Any,)
    if not isinstance(origin, type):
        return ()
    if issubclass(origin, Mapping):
        return forms(arguments[1]) if len(arguments) == 2 else (Any,)
    if issubclass(origin, tuple) and arguments and isinstance(key, int):
        if arguments[-1] is Ellipsis:
            return forms(arguments[0])
        return forms(arguments[key]) if 0 <= key < len(arguments) else ()
    if issubclass(origin, (Sequence, Set)) and not issubclass(origin, str) and isinstance(key, int):
        return forms(arguments[0]) if arguments else (Any,)
    return ()


def forms_at(schema: Any, path: KeyPath, tree: Node | None = None) -> tuple[Any, ...]:
    """The forms at a path; of several sections only those that agree with the values `tree` gives their literals."""
    found = fitting(forms(schema), tree)
    for key in path:
        if isinstance(tree, Branch):
            tree = tree.items.get(matching_key(tree.items, key))
        else:
            tree = None
        found = fitting(tuple(form for outer in found for form in below(outer, key)), tree)
    return found


def fitting(found: tuple[Any, ...], tree: Node | None) -> tuple[Any, ...]:
    """The forms without the sections whose literal fields, such as `type`, have another value in the tree."""
    if not isinstance(tree, Branch):
        return found
    kept = tuple(form for form in found if not (is_section(form) and contradicts(form, tree)))
    return kept or found


def contradicts(form: type[BaseModel], tree: Branch) -> bool:
    """Whether the tree gives a field of this section a value that the field's Literal does not allow."""
    for name, field in fields(form).items():
        given = tree.items.get(name)
        allowed = [value for member in forms(field.annotation) for value in literal_values(member)]
        if allowed and isinstance(given, Leaf) and given.value not in allowed:
            return True
    return False


def literal_values(form: Any) -> tuple[Any, ...]:
    """The values of a Literal or an enumeration."""
    if typing.get_origin(form) is typing.Literal:
        return typing.get_args(form)
    if isinstance(form, type) and issubclass(form, enum.Enum):
        return tuple(member.value for member in form)
    return ()


def kinds(found: tuple[Any, ...]) -> frozenset[str]:
    """The kinds of value the forms take: none, bool, int, float, text, list, tuple, dict. Empty: anything may fit."""
    result: set[str] = set()
    for form in found:
        origin = typing.get_origin(form) or form
        if literal_values(form):
            result |= {SCALARS.get(type(value), "text") for value in literal_values(form)}
        elif is_section(form):
            result.add("dict")
        elif origin in SCALARS:
            result.add(SCALARS[origin])
        elif not isinstance(origin, type):
            return frozenset()
        elif issubclass(origin, (str, PurePath)):
            result.add("text")
        elif issubclass(origin, Mapping):
            result.add("dict")
        elif issubclass(origin, tuple):
            result.add("tuple")
        elif issubclass(origin, (Sequence, Set)):
            result.add("list")
        else:
            return frozenset()
    return frozenset(result)


def names_at(schema: Any, path: KeyPath, tree: Node | None = None) -> list[str]:
    """The field names that the schema knows at a path."""
    return list(
        dict.fromkeys(name for form in forms_at(schema, path, tree) if is_section(form) for name in fields(form))
    )


def all_names(schema: Any) -> Iterator[KeyPath]:
    """The path of every field of the schema, outer ones first; a section inside itself is not followed."""
    waiting: list[tuple[KeyPath, Any, tuple[Any, ...]]] = [((), form, ()) for form in forms(schema)]
    while waiting:
        path, form, outer = waiting.pop(0)
        if not is_section(form) or form in outer:
            continue
        for name, field in fields(form).items():
            yield (*path, name)
            waiting.extend(((*path, name), member, (*outer, form)) for member in forms(field.annotation))


def suggest(schema: Any, path: KeyPath, key: str, tree: Node | None = None) -> str:
    """What the user may have meant by the unknown `key` at `path`: the nearest name there, the same one elsewhere, or
    the nearest one elsewhere; else the names there are."""
    here = [name for name in names_at(schema, path, tree) if name != key]
    if key.startswith("no_") and key[3:] in here:
        return f"write --{dotted((*path, key[3:]))} False"
    near = difflib.get_close_matches(key, here, n=1, cutoff=0.75)
    if near:
        return f"did you mean {dotted((*path, near[0]))}?"
    elsewhere: dict[str, KeyPath] = {}
    for place in all_names(schema):
        if place[:-1] != path:
            elsewhere.setdefault(str(place[-1]), place)
    near = difflib.get_close_matches(key, elsewhere, n=1, cutoff=0.8)
    if key in elsewhere or near:
        return f"did you mean {dotted(elsewhere[key if key in elsewhere else near[0]])}?"
    near = difflib.get_close_matches(key, here, n=1, cutoff=0.6)
    if near:
        return f"did you mean {dotted((*path, near[0]))}?"
    listed = ", ".join(here[:MAX_NAMES]) + (", …" if len(here) > MAX_NAMES else "")
    return f"the names here are {listed}" if here else "there are no names here"


def fit_keys(node: Node, found: tuple[Any, ...]) -> Node:
    """The tree with keys as the schema types them: "33" becomes 33 in a dict of whole numbers, 33 "33" in one of text.

    What the schema does not type keeps its keys.
    """
    if isinstance(node, Leaf) or not found or found == (Any,):
        return node
    found = fitting(found, node)
    mappings = [typing.get_args(form) for form in found if is_mapping(form)]
    key_kinds = {kind for arguments in mappings if len(arguments) == 2 for kind in kinds(forms(arguments[0]))}
    items: dict[Key, Node] = {}
    for key, item in node.items.items():
        if key_kinds == {"int"}:
            key = number_key(key)
        elif key_kinds == {"text"} or any(is_section(form) for form in found):
            key = str(key)
        items[key] = fit_keys(item, tuple(member for form in found for member in below(form, key)))
    return Branch(items, node.origin, node.replaces)


def is_mapping(form: Any) -> bool:
    """Whether a form is a dict type."""
    origin = typing.get_origin(form) or form
    return isinstance(origin, type) and not is_section(form) and issubclass(origin, Mapping)
