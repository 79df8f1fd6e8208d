"""Write docs/config_keys.md, the reference of every key, from the schemas themselves.

python tools/config_keys.py            write the page
python tools/config_keys.py --check    exit 1 if the page is not what would be written
"""

from __future__ import annotations

import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from generated_page import write_or_check
from pydantic.fields import FieldInfo

from longtake.config.schema import forms, is_section
from longtake.config.section import Section
from longtake.families.registry import default_model
from longtake.generate.config import GenerateConfig
from longtake.train.config import RunConfig

PAGE = Path(__file__).parent.parent / "docs" / "config_keys.md"
HEAD = """# Every key

Look up a key of a run file or flag: its type, default and meaning.

```
longtake config show custom --lr 1e-3
```

Written by `python tools/config_keys.py` from the schemas; how files and flags work is in [config.md](config.md).
`longtake config show RUN` prints the values of a run and where each comes from.
"""


@dataclass
class Table:
    """The keys of one section, or of one `type` of it: (dotted key, type, default, description) rows."""

    heading: str
    rows: list[tuple[str, str, str, str]] = field(default_factory=list)

    def __str__(self) -> str:
        rows = [f"| `{key}` | {kind} | {default} | {text} |" for key, kind, default, text in self.rows]
        return "\n".join([f"### {self.heading}\n", "| key | type | default | |", "|---|---|---|---|", *rows, ""])


def page() -> str:
    """The whole page as Markdown."""
    parts = [HEAD, "## `longtake train`\n", *map(str, filled(tables(RunConfig, "Keys of the run")))]
    of_generation = filled(tables(GenerateConfig, "Keys of generation", known=RunConfig))
    parts += ["## `longtake generate`\n", "The model's and encoders' keys as above, and:\n", *map(str, of_generation)]
    return "\n".join(parts)


def filled(found: list[Table]) -> list[Table]:
    return [table for table in found if table.rows]


def tables(schema: type[Section], heading: str, prefix: str = "", known: type[Section] | None = None) -> list[Table]:
    """A table of the schema's own keys, then one per section in it and per `type` of a section; those of `known` left
    out."""
    own = Table(heading)
    inner: list[Table] = []
    for name, info in schema.model_fields.items():
        if known is not None and name in known.model_fields:
            continue
        key = prefix + name
        sections = forms(info.annotation)
        if not all(map(is_section, sections)):
            sections = ()
        same = twin(sections, name, prefix)
        if same is not None:
            default = "the run's" if prefix else f"type `{default_type(info)!r}`"
            text = info.description or f"as `{same}`"
            own.rows.append((key, f"keys of `{same}`", default, text))
        elif len(sections) == 1:
            inner += tables(sections[0], f"`{key}`", f"{key}.")
        elif sections:
            inner += tables_of_union(sections, info, key)
        else:
            own.rows.append((key, shown_type(info.annotation), shown_default(info), described(name, info)))
            nested = [form for part in get_args(info.annotation) for form in forms(part) if is_section(form)]
            for section in nested if len(nested) == 1 else ():  # that or None
                inner += tables(section, f"`{key}`", f"{key}.")
    return [own, *inner]


def twin(sections: tuple[type[Section], ...], name: str, prefix: str) -> str | None:
    """The run's own section that an inner one of the same name stands for, or one of the same types."""
    if len(sections) == 1 and prefix and name in RunConfig.model_fields:
        return name
    alike = [other for other, info in RunConfig.model_fields.items() if forms(info.annotation) == sections]
    return alike[0] if len(sections) > 1 and name not in RunConfig.model_fields and alike else None


def tables_of_union(sections: tuple[type[Section], ...], info: FieldInfo, key: str) -> list[Table]:
    """The key `type`, then a table per type."""
    kinds = [section.model_fields["type"] for section in sections]
    shown = ", ".join(f"`{kind.default!r}`" for kind in kinds)
    text = "; ".join(described("type", kind) for kind in kinds)
    found = [Table(f"`{key}`", [(f"{key}.type", shown, f"`{default_type(info)!r}`", text)])]
    for kind, section in zip(kinds, sections, strict=True):
        of_type = tables(section, f"`{key}`, type `{kind.default}`", f"{key}.")
        of_type[0].rows = [row for row in of_type[0].rows if row[0] != f"{key}.type"]
        found += of_type
    return found


def default_type(info: FieldInfo) -> str:
    """The `type` that a section has by default; where it follows from the model's family, that of the default one."""
    return info.get_default(call_default_factory=True, validated_data={"model": default_model()}).type


def described(name: str, info: FieldInfo) -> str:
    """The field's description; every key has one."""
    if not info.description:
        raise SystemExit(f"tools/config_keys.py: key {name} has no description; give its Field one")
    return info.description.replace("|", "\\|")


def shown_default(info: FieldInfo) -> str:
    if info.default_factory_takes_validated_data:
        return "the family's"
    return "required" if info.is_required() else f"`{info.get_default(call_default_factory=True)!r}`"


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


if __name__ == "__main__":
    write_or_check(PAGE, lambda _: page(), __doc__)
