"""Packages that offer names without importing the modules that define them.

A package's `__init__` lists what it offers as imports under `if TYPE_CHECKING:`, where readers, linters and type
checkers find it and the interpreter does not go, and sets `__getattr__ = lazy_exports(__name__)` (PEP 562). A name's
module is then imported when the name is first taken: `longtake --help` without PyTorch is the point of it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from importlib import import_module, util
from typing import Any


def lazy_exports(package: str) -> Callable[[str], Any]:
    """The `__getattr__` of a package: a name from its module, as the package's `if TYPE_CHECKING:` says."""
    modules: dict[str, str] = {}

    def take(name: str) -> Any:
        if name.startswith("__"):  # the import system asks for some of these, and no package exports one
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        modules.update(modules or exported_names(package))
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(import_module(modules[name]), name)
        except AttributeError as error:  # as it is, `from package import name` would pass it off as a missing name
            raise ImportError(f"cannot import {name!r} from {modules[name]!r}: {error}") from error

    return take


def exported_names(package: str) -> dict[str, str]:
    """Each name that a package offers and the module that defines it, read from the source of its `__init__`."""
    spec = util.find_spec(package)
    assert spec is not None, package
    assert spec.loader is not None, package
    body = ast.parse(spec.loader.get_source(package)).body  # type: ignore[attr-defined]
    blocks = [node.body for node in body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [node for block in blocks for node in block if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module for node in imports for alias in node.names if node.module is not None}
