"""Imports between packages, and what model files may not do."""

from __future__ import annotations

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "longtake"
LEVELS = (  # from the ground up; a package imports from lower levels only
    ("chunks", "contracts", "durable", "locks", "presets", "processes", "random", "transfer", "_version"),
    ("pages", "plain_pickle", "small_files", "tensor_files"),
    ("report", "torch_files"),
    ("config", "hub"),
    ("buckets", "models"),
    ("data", "diffusion", "parallel", "track"),
    ("checkpoint", "weights", "encoders"),
    ("families",),
    ("system",),
    ("generate",),
    ("plan", "encode", "evaluate"),
    ("train",),
    ("watch",),
    ("demo", "dialects", "cluster", "ui", "doctor", "verification"),
    ("api",),
    ("cli", "scripts"),
    ("__main__",),
)
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")
FORBIDDEN_IN_MODELS = ("torch.distributed", "io", "os", "pathlib", "safetensors", "json", "pickle")
# A model file sees of the config system the classes that its own section derives from, and how these name a class.
ALLOWED_CONFIG_NAMES = {"OpenSection", "Section"}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def room(path: Path) -> str:
    """The package or module right below `longtake` that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def imports(path: Path) -> list[tuple[int, str, str | None]]:
    """Every import of a file, those inside functions too: line, module, and the name taken from it."""
    found: list[tuple[int, str, str | None]] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(path)}:{node.lineno}: a relative import; write the whole name"
            found += [(node.lineno, node.module or "", alias.name) for alias in node.names]
    return found


def imported_room(module: str, taken: str | None) -> str | None:
    """The room that an import enters; None for what is not Longtake's, and for the package's own version."""
    parts = module.split(".")
    if parts[0] != "longtake":
        return None
    if len(parts) > 1:
        return parts[1]
    return taken if taken in LEVEL else None


def test_every_package_has_a_level() -> None:
    assert {room(path) for path in FILES} <= LEVEL.keys()


def test_imports_go_down_only() -> None:
    upward = []
    for path in FILES:
        for line, module, taken in imports(path):
            package, imported = room(path), imported_room(module, taken)
            if imported not in (None, package) and LEVEL[imported] >= LEVEL[package]:
                upward.append(f"{name(path)}:{line}: {package} imports {imported}")
    assert upward == []


def modules_of(room_path: Path) -> dict[str, Path]:
    """The modules of a package by the name that an import gives them; the package itself is its `__init__`."""
    files = sorted(room_path.rglob("*.py"))
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in files}


@pytest.mark.parametrize("package", sorted(path.parent for path in PACKAGE.glob("*/__init__.py")), ids=name)
def test_modules_of_a_package_do_not_import_each_other_in_a_circle(package: Path) -> None:
    """Imports inside functions and for annotations count too."""
    modules, needs = modules_of(package), {}
    packages = {module for module, path in modules.items() if path.name == "__init__.py"}
    for own, path in modules.items():
        needs[own] = set()
        for line, module, taken in imports(path):
            found = f"{module}.{taken}" if f"{module}.{taken}" in modules else module
            inside = found in packages and own.startswith(f"{found}.")
            assert not inside, f"{name(path)}:{line}: takes {taken} from its own package {found}; name its module"
            needs[own] |= {found} & modules.keys() - {own}
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


@pytest.mark.parametrize("path", sorted((PACKAGE / "models").glob("*.py")), ids=name)
def test_a_model_file_knows_no_process_no_config_file_and_no_file(path: Path) -> None:
    for line, module, taken in imports(path):
        place = f"{name(path)}:{line}: imports {module}"
        assert not any(module == word or module.startswith(f"{word}.") for word in FORBIDDEN_IN_MODELS), place
        assert not (module == "torch" and taken == "distributed"), place
        if module.startswith("longtake.config"):
            assert taken in ALLOWED_CONFIG_NAMES, f"{place}: {taken}"
    calls = [node.func for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call)]
    opened = [call for call in calls if isinstance(call, ast.Name) and call.id == "open"]
    assert not opened, f"{name(path)}: opens a file"


def test_no_two_classes_have_one_name() -> None:
    places: dict[str, list[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name.lstrip("_"), []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {name: of for name, of in places.items() if len(of) > 1} == {}
