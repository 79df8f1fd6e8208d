"""Examples in the docstrings of what `longtake` exports."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest

import longtake
from longtake.presets import find_preset

NAMES = [name for name in longtake.__all__ if name != "__version__"]
OF_OTHERS = {"Batch"}  # a record that loaders make; its page shows it


def public_members(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield an exported object and, of a class of the API, its public methods that take part in a run."""
    yield value.__name__, value
    if inspect.isclass(value) and value.__module__.startswith("longtake.api"):
        yield from ((name, member) for name, member in vars(value).items() if not name.startswith("_"))


def example_of(docstring: str) -> str:
    """Return the indented block of a docstring, without its indentation; empty where it has none."""
    lines = inspect.cleandoc(docstring).split("\n")
    return textwrap.dedent("\n".join(line for line in lines if line.startswith("    ")))


@pytest.mark.parametrize("name", NAMES)
def test_exported_name_has_an_example_that_parses_and_names_presets_that_exist(name: str) -> None:
    examples = {}
    for member, value in public_members(getattr(longtake, name)):
        function = value.__func__ if isinstance(value, classmethod) else value
        examples[member] = example_of(inspect.getdoc(function) or "")
    assert examples[getattr(longtake, name).__name__] or name in OF_OTHERS
    for member, example in examples.items():
        for node in ast.walk(ast.parse(example, member)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "longtake.Run.preset":
                preset = ast.literal_eval(node.args[0])
                assert find_preset(preset) is not None, f"{member}: {preset}"
