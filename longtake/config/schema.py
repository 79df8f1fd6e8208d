"""What a schema says about a place in the tree, for hints and for flags: the names there are, the values that fit.

A schema is a `Section` or dict; its values are sections, scalars, Literals, lists, tuples, dicts and unions of these. A
*form* is one of the types a place may have, unions taken apart.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from longtake.config.dump import plain_data
from longtake.config.section import OpenSection
from longtake.config.tree import Branch, Key, KeyPath, Leaf, Node, Origin, dotted, grow, matching_key, merge, number_key

KINDS: dict[Any, str] = {
    **{bool: "bool", int: "int", float: "float", str: "text", type(None): "none"},
    **{list: "list", tuple: "tuple", dict: "dict"},
}
MAX_NAMES = 12  # valid names that a fix lists
DEFAULT = "default"


def forms(annotation: Any) -> tuple[Any, ...]:
    """Return the types an annotation allows: unions, aliases and Annotated taken apart."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return forms(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return tuple(form for member in typing.get_args(annotation) for form in forms(member))
    if annotation is None:
        return (type(None),)
    if isinstance(annotation, type) and issubclass(annotation, OpenSection) and annotation.is_open():
        return tuple(annotation.KINDS.values())
    return (annotation,)


def is_section(form: Any) -> bool:
    return isinstance(form, type) and issubclass(form, BaseModel)


def fields(form: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields of a section by the names a user writes."""
    return {field.alias or name: field for name, field in form.model_fields.items()}


def below(form: Any, key: Key) -> tuple[Any, ...]:
    """Return the forms of the entry `key` of a value of this form; none where it can have no such entry."""
    if is_section(form):
        field = fields(form).get(str(key))
        return () if field is None else forms(field.annotation)
    origin, arguments = typing.get_origin(form) or form, typing.get_args(form)
    if origin is Any:
        return (Any,)
    if origin is dict:
        return forms(arguments[1]) if arguments else (Any,)
    if origin not in (list, tuple) or not isinstance(key, int):
        return ()
    if origin is tuple and arguments and arguments[-1] is not Ellipsis:
        return forms(arguments[key]) if 0 <= key < len(arguments) else ()
    return forms(arguments[0]) if arguments else (Any,)


def entries_of(found: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the forms of an entry, where some of the forms are lists of any length; none elsewhere."""
    entries: list[Any] = []
    for form in found:
        origin, arguments = typing.get_origin(form), typing.get_args(form)
        if origin is list or (origin is tuple and arguments[1:] == (Ellipsis,)):
            entries += forms(arguments[0])
    return tuple(entries)


def forms_at(schema: Any, path: KeyPath, tree: Node | None = None) -> tuple[Any, ...]:
    """Return the forms at a path; of several sections only those that agree with the values `tree` gives their
    literals."""
    found = fitting(forms(schema), tree)
    for key in path:
        tree = tree.items.get(matching_key(tree.items, key)) if isinstance(tree, Branch) else None
        found = fitting(tuple(form for outer in found for form in below(outer, key)), tree)
    return found


def fitting(found: tuple[Any, ...], tree: Node | None) -> tuple[Any, ...]:
    """Return the forms without the sections whose literal fields, such as `type`, have another value in the tree."""
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
    return typing.get_args(form) if typing.get_origin(form) is typing.Literal else ()


def kinds(found: tuple[Any, ...]) -> frozenset[str]:
    """Return the kinds of value the forms take: none, bool, int, float, text, list, tuple, dict. Empty: anything may
    fit."""
    result: set[str] = set()
    for form in found:
        origin = typing.get_origin(form) or form
        if literal_values(form):
            result |= {KINDS[type(value)] for value in literal_values(form)}
        elif is_section(form):
            result.add("dict")
        elif origin in KINDS:
            result.add(KINDS[origin])
        else:
            return frozenset()
    return frozenset(result)


def all_names(schema: Any) -> Iterator[KeyPath]:
    """Yield the path of every field of the schema, outer ones first; a section inside itself is not followed."""
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
    sections = [form for form in forms_at(schema, path, tree) if is_section(form)]
    here = list(dict.fromkeys(name for form in sections for name in fields(form) if name != key))
    if known := next((form.OTHER_WORDS[key] for form in sections if key in getattr(form, "OTHER_WORDS", {})), None):
        return f"did you mean {known}?"
    if owners := _other_kinds(schema, path, key, sections):
        return owners
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


def _other_kinds(schema: Any, path: KeyPath, key: str, chosen: list[type[BaseModel]]) -> str:
    """Return a hint that names the values of `type` whose section has the key, where the one chosen has not; else
    empty."""
    kinds = {kind: form for form in forms_at(schema, path) for kind in _kind_names(form)}
    owners = [kind for kind, form in kinds.items() if key in fields(form)]
    own = [kind for kind, form in kinds.items() if form in chosen]
    if not owners or not own or len(own) == len(kinds):
        return ""
    named = " or ".join(f'"{kind}"' for kind in owners[:MAX_NAMES])
    return f'it belongs to {dotted((*path, "type"))} = {named}, and this is "{own[0]}"'


def _kind_names(form: Any) -> tuple[str, ...]:
    """Return the values of `type` that stand for this section; none where it has no such field."""
    field = fields(form).get("type") if is_section(form) else None
    return () if field is None else tuple(name for member in forms(field.annotation) for name in literal_values(member))


def fit_keys(node: Node, found: tuple[Any, ...]) -> Node:
    """Return the tree with keys as the schema types them: "33" becomes 33 in a dict of whole numbers, 33 "33" in one of
    text."""
    if isinstance(node, Leaf) or not found or found == (Any,):
        return node
    found = fitting(found, node)
    typed = [typing.get_args(form) for form in found if typing.get_origin(form) is dict]
    key_kinds = {kind for key_type, _ in typed for kind in kinds(forms(key_type))}
    items: dict[Key, Node] = {}
    for key, item in node.items.items():
        if key_kinds == {"int"}:
            key = number_key(key)
        elif key_kinds == {"text"} or any(is_section(form) for form in found):
            key = str(key)
        items[key] = fit_keys(item, tuple(member for form in found for member in below(form, key)))
    return Branch(items, node.origin, node.replaces)


def underlaid(node: Node, found: tuple[Any, ...]) -> Node:
    """Return the tree laid over the default sections of its schema: `--model.depth 2` keeps the default's type of
    model.

    `found` are the forms of the node. A default counts where a field has a section as its default and the tree gives a
    dict for it that neither replaces (`_delete_`) nor contradicts the literals of the default, such as its `type`.
    """
    if isinstance(node, Leaf):
        return node
    items = dict(node.items)
    for form in fitting(found, node):
        if not is_section(form):
            continue
        for name, field in fields(form).items():
            given = items.get(name)
            if not isinstance(given, Branch):
                continue
            default = default_section(field)
            if default is not None and not given.replaces and not asks_for_another(default, given):
                given = merge(grow(set_values(default), Origin(DEFAULT)), given, lambda fault: None)
            items[name] = underlaid(given, forms(field.annotation))
    return Branch(items, node.origin, node.replaces)


def default_section(field: FieldInfo) -> BaseModel | None:
    """Return the section that is a field's default; None where the default is something else."""
    default = field.default
    if field.default_factory is not None and not field.default_factory_takes_validated_data:
        default = field.get_default(call_default_factory=True)
    return default if isinstance(default, BaseModel) else None


def asks_for_another(default: BaseModel, given: Branch) -> bool:
    """Whether the tree asks for another section than the default: a literal field has another value."""
    items = ((name, given.items.get(name)) for name in literal_fields(default))
    return any(isinstance(item, Leaf) and item.value != getattr(default, name) for name, item in items)


def set_values(section: BaseModel) -> dict[str, Any]:
    """Return the values a section was built with, and the single literals that tell it from other sections."""
    found: dict[str, Any] = {}
    for name in [*literal_fields(section), *sorted(section.model_fields_set)]:
        value = getattr(section, name)
        found[name] = set_values(value) if isinstance(value, BaseModel) else plain_data(value)
    return found


def literal_fields(section: BaseModel) -> list[str]:
    """Return the fields of a section that can have one value only: they say which kind of section it is."""
    return [
        name
        for name, field in type(section).model_fields.items()
        if len([value for form in forms(field.annotation) for value in literal_values(form)]) == 1
    ]
