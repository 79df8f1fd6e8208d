"""Writes docs/config_keys.md, the reference of every key, from the schemas themselves.

python tools/config_keys.py            write the page
python tools/config_keys.py --check    exit 1 if the page is not what would be written
"""

from __future__ import annotations

import argparse
import sys
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from longtake.config import Section
from longtake.config.schema import forms, is_section
from longtake.families import default_model
from longtake.generate import GenerateConfig
from longtake.train import RunConfig

PAGE = Path(__file__).parent.parent / "docs" / "config_keys.md"
HEAD = """# Every key

Look up a key of a run file or flag: its type, default and meaning.

```
longtake config show custom --lr 1e-3
```

Written by `python tools/config_keys.py` from the schemas; how files and flags work is in [config.md](config.md).
`longtake config show RUN` prints the values of a run and where each comes from.
"""


def page() -> str:
    """The whole page as Markdown."""
    parts = [HEAD, "## `longtake train`\n", table(RunConfig)]
    parts += ["## `longtake generate`\n", "The model's keys as above, and:\n", table(GenerateConfig, known=RunConfig)]
    return "\n".join(parts)


def table(schema: type[Section], known: type[Section] | None = None) -> str:
    """The keys of a schema, sections taken apart; those of `known` left out."""
    rows = ["| key | type | default | |", "|---|---|---|---|"]
    rows += [
        f"| `{key}` | {kind} | {default} | {text} |"
        for key, kind, default, text in keys(schema)
        if known is None or key.split(".")[0] not in known.model_fields
    ]
    return "\n".join(rows) + "\n"


def keys(schema: type[Section], prefix: str = "") -> list[tuple[str, str, str, str]]:
    """(dotted key, type, default, description) of every key."""
    found = []
    for name, field in schema.model_fields.items():
        sections = forms(field.annotation)
        if not all(map(is_section, sections)):
            sections = ()
        if len(sections) == 1 and prefix and name in RunConfig.model_fields:  # that of the run where nothing is said
            found.append((prefix + name, f"keys of `{name}`", "the run's", described(name, field)))
        elif len(sections) == 1:
            found += keys(sections[0], f"{prefix}{name}.")
        elif sections:
            found += keys_of_union(sections, field, f"{prefix}{name}.")
        else:
            found.append((prefix + name, shown_type(field.annotation), shown_default(field), described(name, field)))
            inner = [form for part in get_args(field.annotation) for form in forms(part) if is_section(form)]
            for section in inner if len(inner) == 1 else ():  # that or None
                found += keys(section, f"{prefix}{name}.")
    return found


def keys_of_union(
    sections: tuple[type[Section], ...], field: FieldInfo, prefix: str
) -> list[tuple[str, str, str, str]]:
    """The keys of sections that are told apart by `type`: this one once, the others with the type they belong to."""
    kinds = [section.model_fields["type"] for section in sections]
    shown, text = (
        ", ".join(f"`{kind.default!r}`" for kind in kinds),
        "; ".join(described("type", kind) for kind in kinds),
    )
    # of sections that follow from the model's family: that of the default one
    usual = field.get_default(call_default_factory=True, validated_data={"model": default_model()})
    found = [(f"{prefix}type", shown, f"`{usual.type!r}`", text)]
    for kind, section in zip(kinds, sections, strict=True):
        found += [
            (key, shown, default, f"`{kind.default}`: {text}")
            for key, shown, default, text in keys(section, prefix)
            if key != f"{prefix}type"
        ]
    return found


def described(name: str, field: FieldInfo) -> str:
    """The field's description; every key has one."""
    if not field.description:
        raise SystemExit(f"tools/config_keys.py: key {name} has no description; give its Field one")
    return field.description.replace("|", "\\|")


def shown_default(field: FieldInfo) -> str:
    if field.default_factory_takes_validated_data:
        return "the family's"
    return "required" if field.is_required() else f"`{field.get_default(call_default_factory=True)!r}`"


def shown_type(kind: Any) -> str:
    """A type as a person writes it: `int`, `"bf16"`, `(int, int)`."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal:
        return ", ".join(f"`{part!r}`" for part in parts)
    if origin in (Union, types.UnionType):
        return " or ".join(shown_type(part) for part in parts)
    if origin is tuple and parts[-1] is Ellipsis:
        return f"list of {shown_type(parts[0])}"
    if origin is tuple:
        return "(" + ", ".join(shown_type(part) for part in parts) + ")"
    if origin in (dict, list):
        return f"{origin.__name__} of " + ", ".join(shown_type(part) for part in parts)
    if hasattr(kind, "__metadata__"):  # Annotated
        return shown_type(kind.__origin__)
    if is_section(kind):
        return "section"
    return "None" if kind is type(None) else getattr(kind, "__name__", str(kind)).lower().replace("any", "any value")


def main() -> None:
    """Writes or checks the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        if PAGE.read_text(encoding="utf-8") != page():
            sys.exit("docs/config_keys.md: not up to date; run python tools/config_keys.py")
    else:
        PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
