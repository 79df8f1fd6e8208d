"""What a schema finds wrong, in our words: pydantic's errors become faults with place, value, rule and fix."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from longtake.config.faults import MAX_FAULTS, Fault, shown
from longtake.config.schema import fit_keys, forms, forms_at, kinds, literal_values, suggest
from longtake.config.tree import Branch, KeyPath, Leaf, Node, dotted, leaves, matching_key, nearest, plain

# Rule and fix for each type of pydantic error that needs no more than its own figures.
RULES: dict[str, tuple[str, str]] = {
    "int_type": ("must be a whole number", "write for example 8"),
    "int_parsing": ("must be a whole number", "write for example 8"),
    "int_from_float": ("must be a whole number", "write for example 8"),
    "int_parsing_size": ("is too large a number", ""),
    "float_type": ("must be a number", "write for example 1e-4"),
    "float_parsing": ("must be a number", "write for example 1e-4"),
    "finite_number": ("must be a finite number", "write for example 1e-4"),
    "bool_type": ("must be True or False", ""),
    "bool_parsing": ("must be True or False", ""),
    "string_type": ("must be text", 'write it in quotes, as "x"'),
    "path_type": ("must be a path", 'write it in quotes, as "folder/file"'),
    "list_type": ("must be a list", "write for example [1, 2]"),
    "tuple_type": ("must be a list or tuple", "write for example (1, 2)"),
    "set_type": ("must be a list", "write for example [1, 2]"),
    "frozen_set_type": ("must be a list", "write for example [1, 2]"),
    "dict_type": ("must be a dict", "write dict(key=value)"),
    "mapping_type": ("must be a dict", "write dict(key=value)"),
    "model_type": ("must be a dict of its keys", "write dict(key=value)"),
    "model_attributes_type": ("must be a dict of its keys", "write dict(key=value)"),
    "dataclass_type": ("must be a dict of its keys", "write dict(key=value)"),
    "none_required": ("must be None", ""),
    "greater_than": ("must be greater than {gt}", ""),
    "greater_than_equal": ("must be at least {ge}", ""),
    "less_than": ("must be less than {lt}", ""),
    "less_than_equal": ("must be at most {le}", ""),
    "multiple_of": ("must be a multiple of {multiple_of}", ""),
    "string_too_short": ("must have at least {min_length} characters", ""),
    "string_too_long": ("must have at most {max_length} characters", ""),
    "string_pattern_mismatch": ("must match the pattern {pattern}", ""),
    "too_short": ("must have at least {min_length} entries, not {actual_length}", ""),
    "too_long": ("must have at most {max_length} entries, not {actual_length}", ""),
}
MISMATCHES = (
    "_type",
    "_parsing",
    "int_from_float",
    "none_required",
    "literal_error",
    "enum",
)  # of kind, not of content

Problem = Mapping[str, Any]  # one entry of ValidationError.errors()


def translate(error: ValidationError, tree: Branch, schema: Any, file: str) -> list[Fault]:
    """The faults of a tree that its schema refused, in the order of the tree; `file` is where missing keys belong."""
    plain_tree = plain(tree)
    groups: dict[KeyPath, dict[str, list[tuple[KeyPath, Problem]]]] = {}
    for problem in error.errors(include_url=False):
        path, union, member = data_path(problem, plain_tree)
        groups.setdefault(union if union is not None else path, {}).setdefault(member, []).append((path, problem))
    faults: list[Fault] = []
    for union, members in groups.items():
        if len(faults) > MAX_FAULTS:  # no more are shown, and hints take time
            break
        faults.extend(union_faults(union, members, tree, schema, file))
    return list(dict.fromkeys(faults))


def data_path(problem: Problem, tree: Any) -> tuple[KeyPath, KeyPath | None, str]:
    """Where in the data a problem is; and, if it belongs to one member of a union, the union's place and that member.

    Pydantic mixes the names of union members (`int`, `ModelConfig`) into the path; what the data does not have is one.
    """
    path: list[str | int] = []
    union: KeyPath | None = None
    members: list[str] = []
    here = tree
    loc = problem["loc"]
    for position, part in enumerate(loc):
        last = position == len(loc) - 1
        if part == "[key]":
            continue
        if isinstance(here, dict) and (part in here or matching_key(here, part) in here):
            path.append(matching_key(here, part))
            here = here[path[-1]]
        elif isinstance(here, (list, tuple)) and isinstance(part, int) and part < len(here):
            path.append(part)
            here = here[part]
        elif last and problem["type"] in ("missing", "extra_forbidden", "invalid_key"):
            path.append(part)
        else:
            union = tuple(path) if union is None else union
            members.append(str(part))
    return tuple(path), union, ".".join(members)


def union_faults(
    union: KeyPath, members: dict[str, list[tuple[KeyPath, Problem]]], tree: Branch, schema: Any, file: str
) -> Iterator[Fault]:
    """The faults of one place. Of a union, those of the member that came nearest; where none is near, all in one."""
    near = {
        member: found
        for member, found in members.items()
        if not any(path == union and str(problem["type"]).endswith(MISMATCHES) for path, problem in found)
    }
    if len(members) == 1 or near:
        found = min((near or members).values(), key=len)
        for path, problem in found:
            yield fault(path, problem, tree, schema, file)
        return
    firsts = [fault(*found[0], tree, schema, file) for found in members.values()]
    rules = [first.rule.removeprefix("must be ") for first in firsts]
    fix = next((first.fix for first in firsts if first.fix), "")
    yield Fault(firsts[0].place, firsts[0].value, "must be " + " or ".join(dict.fromkeys(rules)), fix, firsts[0].key)


def fault(path: KeyPath, problem: Problem, tree: Branch, schema: Any, file: str) -> Fault:
    """One problem as a fault."""
    node = nearest(tree, path)
    place, key = (str(node.origin) if path else file), dotted(path)
    kind, context = problem["type"], problem.get("ctx") or {}
    value = "" if kind == "missing" or not path else shown(problem["input"])
    if kind == "missing":
        return missing(path, node, key, place if node is not tree else file)
    if kind in ("extra_forbidden", "invalid_key"):
        if isinstance(problem["input"], dict):
            value = ""
        return Fault(place, value, "is no key", suggest(schema, path[:-1], str(path[-1]), tree), key)
    if kind in ("value_error", "assertion_error"):
        value = "" if isinstance(problem["input"], dict) else value
        return Fault(place, value, str(context.get("error", problem["msg"])), "", key)
    if kind in ("literal_error", "enum"):
        return choice(path, schema, tree, place, value, key, problem)
    if kind == "union_tag_invalid":
        tag = str(context.get("discriminator", "")).strip("'")
        expected = [part.strip(" '") for part in str(context.get("expected_tags", "")).split(",")]
        leaf = nearest(tree, (*path, tag))
        rule, fix = one_of(expected, context.get("tag"))
        return Fault(str(leaf.origin), shown(context.get("tag")), rule, fix, dotted((*path, tag)))
    if kind == "union_tag_not_found":
        tag = str(context.get("discriminator", "")).strip("'")
        return Fault(place, "", "is required", "say which kind this is", dotted((*path, tag)))
    rule, fix = RULES.get(kind, (problem["msg"][:1].lower() + problem["msg"][1:], ""))
    return Fault(place, value, rule.format(**context) if kind in RULES else rule, fix, key)


def missing(path: KeyPath, node: Node, key: str, place: str) -> Fault:
    """A key that must be given and is not, or a tuple that is too short."""
    if isinstance(node, Leaf) and isinstance(node.value, (list, tuple)) and isinstance(path[-1], int):
        rule = f"has too few entries: entry {path[-1] + 1} is missing"
        return Fault(place, shown(node.value), rule, "", dotted(path[:-1]))
    return Fault(place, "", "is required", f"write it there or as --{key} value", key)


def choice(path: KeyPath, schema: Any, tree: Branch, place: str, value: str, key: str, problem: Problem) -> Fault:
    """A value that is none of those a Literal or an enumeration allows."""
    allowed = [option for form in forms_at(schema, path, tree) for option in literal_values(form)]
    if not allowed:
        return Fault(place, value, problem["msg"][:1].lower() + problem["msg"][1:], "", key)
    rule, fix = one_of(allowed, problem["input"])
    return Fault(place, value, rule, fix, key)


def one_of(allowed: list[Any], given: Any) -> tuple[str, str]:
    """Rule and fix for a value that must be one of several."""
    texts = [option for option in allowed if isinstance(option, str)]
    near = difflib.get_close_matches(given, texts, n=1) if isinstance(given, str) else []
    listed = ", ".join(shown(option) for option in allowed)
    return f"must be one of {listed}" if len(
        allowed
    ) > 1 else f"must be {listed}", f"did you mean {shown(near[0])}?" if near else ""


def truth_faults(tree: Branch, schema: Any) -> list[Fault]:
    """True and False where a number belongs: pydantic would read them as 1 and 0."""
    faults: list[Fault] = []
    for path, node in leaves(tree):
        if isinstance(node, Leaf) and isinstance(node.value, bool):
            fitting = kinds(forms_at(schema, path, tree))
            if fitting & {"int", "float"} and "bool" not in fitting:
                number = "a whole number" if "float" not in fitting else "a number"
                faults.append(Fault(str(node.origin), shown(node.value), f"must be {number}", "", dotted(path)))
    return faults


def fitted(tree: Branch, schema: Any) -> Branch:
    """The tree with its keys as the schema types them."""
    result = fit_keys(tree, forms(schema))
    assert isinstance(result, Branch)
    return result
