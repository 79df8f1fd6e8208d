"""Sections given in part: the rest of them is what the schema's default says, not what their class says."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from longtake.config.dump import plain_data
from longtake.config.schema import fields, fitting, forms, is_section, literal_values
from longtake.config.tree import Branch, Leaf, Node, Origin, grow, merge

DEFAULT = "default"


def underlaid(node: Node, found: tuple[Any, ...]) -> Node:
    """The tree laid over the default sections of its schema: `--model.depth 2` keeps the default's type of model.

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
            if default is not None and not given.replaces and not contradicts(default, given):
                given = merge(grow(set_values(default), Origin(DEFAULT)), given, lambda fault: None)
            items[name] = underlaid(given, forms(field.annotation))
    return Branch(items, node.origin, node.replaces)


def default_section(field: FieldInfo) -> BaseModel | None:
    """The section that is a field's default; None where the default is something else."""
    default = field.default
    if field.default_factory is not None and not field.default_factory_takes_validated_data:
        default = field.get_default(call_default_factory=True)
    return default if isinstance(default, BaseModel) else None


def contradicts(default: BaseModel, given: Branch) -> bool:
    """Whether the tree asks for another section than the default: a literal field has another value."""
    for name in literal_fields(default):
        item = given.items.get(name)
        if isinstance(item, Leaf) and item.value != getattr(default, name):
            return True
    return False


def set_values(section: BaseModel) -> dict[str, Any]:
    """The values a section was built with, and the single literals that tell it from other sections."""
    names = [*(name for name in literal_fields(section)), *sorted(section.model_fields_set)]
    values = {name: getattr(section, name) for name in names}
    return {
        name: set_values(value) if isinstance(value, BaseModel) else plain_data(value) for name, value in values.items()
    }


def literal_fields(section: BaseModel) -> list[str]:
    """The fields of a section that can have one value only: they say which kind of section it is."""
    return [
        name
        for name, field in type(section).model_fields.items()
        if len([value for form in forms(field.annotation) for value in literal_values(form)]) == 1
    ]
