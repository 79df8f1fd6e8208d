"""What a schema finds wrong, in our words: pydantic's errors become faults with place, value, rule and fix."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from longtake.config.faults import MAX_FAULTS, Fault, shown
from longtake.config.schema import fields, forms_at, is_section, kinds, literal_values, suggest
from longtake.config.tree import Branch, KeyPath, Leaf, dotted, leaves, matching_key, nearest, plain

# Rule and fix for each type of pydantic error that needs no more than its own figures; `_type` and the like share one.
RULES: dict[str, tuple[str, str]] = {
    "int": ("must be a whole number", "write for example 8"),
    "int_parsing_size": ("is too large a number", ""),
    "float": ("must be a number", "write for example 1e-4"),
    "finite_number": ("must be a finite number", "write for example 1e-4"),
    "bool": ("must be True or False", ""),
    "string": ("must be text", 'write it in quotes, as "x"'),
    "list": ("must be a list", "write for example [1, 2]"),
    "tuple": ("must be a list or tuple", "write for example (1, 2)"),
    "dict": ("must be a dict", "write dict(key=value)"),
    "model": ("must be a dict of its keys", "write dict(key=value)"),
    "none_required": ("must be None", ""),
    "greater_than": ("must be greater than {gt}", ""),
    "greater_than_equal": ("must be at least {ge}", ""),
    "less_than": ("must be less than {lt}", ""),
    "less_than_equal": ("must be at most {le}", ""),
    "too_short": ("must have at least {min_length} entries, not {actual_length}", ""),
    "too_long": ("must have at most {max_length} entries, not {actual_length}", ""),
}
ENDS = re.compile(r"_(attributes_type|type|parsing|from_float)$")
# Of kind, not of content.
MISMATCHES = ("_type", "_parsing", "int_from_float", "none_required", "literal_error")

Problem = Mapping[str, Any]  # one entry of ValidationError.errors()


def translate(error: ValidationError, tree: Branch, schema: Any, file: str) -> list[Fault]:
    """Return the faults of a tree that its schema refused, in the order of the tree; `file` is where missing keys
    belong."""
    plain_tree = plain(tree)
    groups: dict[KeyPath, dict[str, list[tuple[KeyPath, Problem]]]] = {}
    for problem in error.errors(include_url=False):
        if problem["type"] == "default_factory_not_called":  # for want of a key that has a fault of its own
            continue
        path, union, member = data_path(problem, plain_tree)
        groups.setdefault(union if union is not None else path, {}).setdefault(member, []).append((path, problem))
    faults: list[Fault] = []
    for union, members in groups.items():
        if len(faults) > MAX_FAULTS:  # no more are shown, and hints take time
            break
        faults.extend(union_faults(union, members, tree, schema, file))
    return list(dict.fromkeys(faults))


def data_path(problem: Problem, tree: Any) -> tuple[KeyPath, KeyPath | None, str]:
    """Where in the data a problem is; of a union, also its place and the member that pydantic has mixed into the
    path."""
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
    """Yield the faults of one place. Of a union, those of the member that came nearest; where none is near,
    all in one."""
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
    node = nearest(tree, path)
    place, key = (str(node.origin) if path else file), dotted(path)
    kind, context = problem["type"], problem.get("ctx") or {}
    value = "" if kind == "missing" or not path else shown(problem["input"])
    if kind == "missing":
        if isinstance(node, Leaf) and isinstance(node.value, (list, tuple)) and isinstance(path[-1], int):
            rule = f"has too few entries: entry {path[-1] + 1} is missing"
            return Fault(place, shown(node.value), rule, "", dotted(path[:-1]))
        return Fault(place if node is not tree else file, "", "is required", f"write it there or as --{key} value", key)
    if kind in ("extra_forbidden", "invalid_key"):
        if isinstance(problem["input"], dict):
            value = ""
        return Fault(place, value, "is no key", suggest(schema, path[:-1], str(path[-1]), tree), key)
    if kind in ("value_error", "assertion_error"):
        value = "" if isinstance(problem["input"], dict) else value
        return Fault(place, value, str(context.get("error", problem["msg"])), "", key)
    if kind == "literal_error":
        options = (option for form in forms_at(schema, path, tree) for option in literal_values(form))
        rule, fix = one_of(list(dict.fromkeys(options)), problem["input"])  # families may share one
        return Fault(place, value, rule, fix, key)
    if kind == "union_tag_invalid":
        tag = str(context.get("discriminator", "")).strip("'")
        expected = [part.strip(" '") for part in str(context.get("expected_tags", "")).split(",")]
        leaf = nearest(tree, (*path, tag))
        rule, fix = one_of(expected, context.get("tag"))
        return Fault(str(leaf.origin), shown(context.get("tag")), rule, fix, dotted((*path, tag)))
    if kind == "union_tag_not_found":
        tag = str(context.get("discriminator", "")).strip("'")
        return Fault(place, "", "is required", "say which kind this is", dotted((*path, tag)))
    known = RULES.get(kind) or RULES.get(ENDS.sub("", kind))
    if problem["input"] is None and known:
        known = known[0], off_value(schema, path, tree) or known[1]
    rule, fix = known or (problem["msg"][:1].lower() + problem["msg"][1:], "")
    return Fault(place, value, rule.format(**context) if known else rule, fix, key)


def off_value(schema: Any, path: KeyPath, tree: Branch) -> str:
    """How to write what None means elsewhere, for a field that refuses it: the 0 of its description, or its default."""
    for form in forms_at(schema, path[:-1], tree):
        field = fields(form).get(str(path[-1])) if is_section(form) else None
        if field is None:
            continue
        if match := re.search(r"(?:^|; )0: ([^;]+)", field.description or ""):
            return f"write 0 ({match[1]})"
        if isinstance(field.default, (int, float, str)):
            return f"leave it out for the default, {shown(field.default)}"
    return ""


def one_of(allowed: list[Any], given: Any) -> tuple[str, str]:
    """Rule and fix for a value that must be one of several."""
    texts = [option for option in allowed if isinstance(option, str)]
    near = difflib.get_close_matches(given, texts, n=1) if isinstance(given, str) else []
    listed = ", ".join(shown(option) for option in allowed)
    rule = f"must be one of {listed}" if len(allowed) > 1 else f"must be {listed}"
    return rule, f"did you mean {shown(near[0])}?" if near else ""


def truth_faults(tree: Branch, schema: Any) -> list[Fault]:
    """Return True and False where a number belongs: pydantic would read them as 1 and 0."""
    faults: list[Fault] = []
    for path, node in leaves(tree):
        if isinstance(node, Leaf) and isinstance(node.value, bool):
            fitting = kinds(forms_at(schema, path, tree))
            if fitting & {"int", "float"} and "bool" not in fitting:
                number = "a whole number" if "float" not in fitting else "a number"
                faults.append(Fault(str(node.origin), shown(node.value), f"must be {number}", "", dotted(path)))
    return faults
