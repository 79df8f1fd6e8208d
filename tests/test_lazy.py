"""What packages offer without importing it."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import longtake
from longtake.lazy import exported_names

PACKAGES = [module.name for module in pkgutil.walk_packages(longtake.__path__, "longtake.") if module.ispkg]
OFFERING = [name for name in PACKAGES if hasattr(importlib.import_module(name), "__getattr__")]


@pytest.mark.parametrize("package", OFFERING)
def test_a_package_offers_what_it_lists_and_no_name_of_a_module(package: str) -> None:
    module = importlib.import_module(package)
    names = exported_names(package)
    for name, place in names.items():
        assert getattr(module, name) is getattr(importlib.import_module(place), name)
    modules = {found.name for found in pkgutil.iter_modules(module.__path__)}
    assert not modules & names.keys(), "the import system would put the module in the place of the name"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package `offering` that offers `thing` of its module `inner`, which holds 1."""
    folder = tmp_path / "offering"
    folder.mkdir()
    offer = "if TYPE_CHECKING:\n    from offering.inner import thing\n"
    head = "from typing import TYPE_CHECKING\nfrom longtake.lazy import lazy_exports\n"
    (folder / "__init__.py").write_text(f"{head}{offer}__getattr__ = lazy_exports(__name__)\n")
    (folder / "inner.py").write_text("thing = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in ("offering", "offering.inner"):
        sys.modules.pop(name, None)


def test_a_module_is_imported_when_its_name_is_taken(package: Path) -> None:
    offering = importlib.import_module("offering")
    assert "offering.inner" not in sys.modules
    assert offering.thing == 1
    sys.modules["offering.inner"].thing = 2
    assert offering.thing == 2, "a name that a test replaces is replaced for all"
    with pytest.raises(AttributeError, match="'offering' has no attribute 'other'"):
        _ = offering.other


def test_a_fault_inside_a_module_is_not_passed_off_as_a_missing_name(package: Path) -> None:
    (package / "inner.py").write_text("import sys\nsys.no_such_thing\n")
    with pytest.raises(ImportError, match="no_such_thing"):
        exec("from offering import thing")


def test_config_sections_need_no_tensors() -> None:
    """`config show`, the doors of every verb and tests of configs import them."""
    sections = [module.name for module in pkgutil.walk_packages(longtake.__path__, "longtake.")]
    imports = "\n".join(f"import {name}" for name in sections if name.endswith(".config") and ".cli" not in name)
    heavy = "import sys; print(*({'torch', 'pyarrow', 'duckdb', 'av', 'PIL', 'safetensors'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", f"{imports}\n{heavy}"], capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.stderr) == ("\n", "")
