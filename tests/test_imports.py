"""The rooms of the house: which package may import which, what model files may not do, how long a file may be."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "longtake"
LEVELS = (  # from the ground up; a package imports from lower levels only
    ("contracts", "durable", "random", "_version"),
    ("config", "hub"),
    ("buckets", "models"),
    ("data", "diffusion", "parallel", "track"),
    ("checkpoint", "weights", "encoders"),
    ("system",),
    ("generate",),
    ("evaluate", "plan", "encode"),
    ("train",),
    ("watch",),
    ("demo", "dialects", "cluster", "serve"),
    ("cli", "scripts"),
    ("__main__",),
)
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")
MOST_LINES = 500
FORBIDDEN_IN_MODELS = ("torch.distributed", "io", "os", "pathlib", "safetensors", "json", "pickle")
# A model file sees of the config system only the class that its own section derives from.
ALLOWED_CONFIG_NAMES = {"Section"}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def room(path: Path) -> str:
    """The package or module right below `longtake` that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[int, str, str | None]]:
    """Every import of a file, those inside functions too: line, module, and the name taken from it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(path)}:{node.lineno}: a relative import; write the whole name"
            yield from ((node.lineno, node.module or "", alias.name) for alias in node.names)


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


@pytest.mark.parametrize("path", FILES, ids=name)
def test_imports_go_down_only(path: Path) -> None:
    own = room(path)
    for line, module, taken in imports(path):
        other = imported_room(module, taken)
        if other is not None and other != own:
            assert LEVEL[other] < LEVEL[own], f"{name(path)}:{line}: {own} imports {other}"


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


def test_files_stay_short() -> None:
    lengths = {name(path): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert {path: count for path, count in lengths.items() if count > MOST_LINES} == {}
