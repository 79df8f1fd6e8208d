"""No name of a family stands outside the rooms that are about families."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from longtake.families.registry import families

ROOT = Path(__file__).resolve().parents[2] / "longtake"
ROOMS = ("models", "weights", "encoders", "families", "dialects", "presets", "configs")
FILES = ("buckets/laws.py",)
NAMES = re.compile(
    r"(?i:MMDiT|double_?blocks?|single_?blocks?|open_?sora|cog_?video|stdit|pixart|hunyuan|end_?(windows|kinds)|ttt_?video|ttt)"
    r"|^_?T5|^_?t5(?=_|$)|^_?CLIP(?=_?L?$)|^_?Clip(?=Encoder|Names)|FLUX|flux_|_flux$|FlowConfig|RectifiedFlow"
)
OWN = {"diffusion": re.compile("FlowConfig|RectifiedFlow|(?i:end_?(windows|kinds))")}  # objectives and laws live there
OF_THE_CONFIG = {"img_flux", "img_flux_ae"}  # keys of run files that stay as Open-Sora wrote them
ORDINARY = {"identity", "image", "interpolate", "quarter", "random"}  # kinds, or their beginnings, that are also words
METHOD = {"i2v"}  # a value of `sampling_option.method`
VALUES_OF_THE_CONFIG = {"system/config.py": METHOD, "generate/config.py": METHOD}
OF_LAWS = ("diffusion/config.py", "diffusion/windows.py")  # where kinds are defined


def outside() -> list[Path]:
    paths = (path for path in ROOT.rglob("*.py") if path.relative_to(ROOT).parts[0] not in ROOMS)
    return sorted(path for path in paths if str(path.relative_to(ROOT)) not in FILES)


def identifiers(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every name that code uses, defines or imports, with its line; texts are not code."""
    for node in ast.walk(tree):
        for field in ("id", "attr", "name", "asname", "arg", "module"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                yield from ((part, getattr(node, "lineno", 0)) for part in value.split("."))


def test_no_identifier_import_or_string_names_a_family() -> None:
    found = []
    for path in outside():
        own = OWN.get(path.relative_to(ROOT).parts[0], re.compile("(?!)"))
        tree = ast.parse(path.read_text(encoding="utf-8"))
        used = dict(identifiers(tree)) | {word: line for text, line in texts(tree) for word in re.findall(r"\w+", text)}
        named = [name for name in used if NAMES.search(name) and not own.search(name) and name not in OF_THE_CONFIG]
        found += [f"{path.relative_to(ROOT)}:{used[name]}: {name}" for name in named]
    assert not found, "\n".join(found)


def texts(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every string that code works with or says, and its line; docstrings are not code."""
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    words = {id(node.body[0].value) for node in ast.walk(tree) if isinstance(node, holders) and is_text(node.body[:1])}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in words:
            yield node.value, node.lineno


def is_text(body: list[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)


def test_no_string_names_a_kind_of_a_family() -> None:
    kinds = {kind for family in families() for kind in family.kinds}
    beginnings = {kind.partition("_")[0] for kind in kinds}  # what several kinds share, for `startswith`
    named = re.compile(rf"\b({'|'.join(sorted((kinds | beginnings) - ORDINARY, key=len, reverse=True))})\b")
    assert {"t2v", "i2v_head", "i2v"} <= {*kinds, *beginnings}
    found = []
    for path in outside():
        if (place := str(path.relative_to(ROOT))) in OF_LAWS:
            continue
        for text, line in texts(ast.parse(path.read_text(encoding="utf-8"))):
            of_kinds = set(named.findall(text)) - VALUES_OF_THE_CONFIG.get(place, set())
            found += [f"{place}:{line}: {name}" for name in sorted(of_kinds)]
    assert not found, "\n".join(found)


def test_the_pattern_knows_the_names_of_the_families() -> None:
    for name in (
        "MMDiTConfig",
        "double_blocks",
        "opensora_v2",
        "T5Encoder",
        "ClipEncoder",
        "CLIP_L",
        "cogvideox",
        "STDiT3",
    ):
        assert NAMES.search(name), name
    for name in ("clip", "clip_ids", "CLIP_FACTS", "ClipTable", "block", "flow", "t"):
        assert not NAMES.search(name), name


@pytest.mark.parametrize("name", ["plain", "everything"])
def test_a_family_is_declared_in_under_200_lines(name: str) -> None:
    lines = (Path(__file__).parent / f"{name}.py").read_text().splitlines()
    assert len([line for line in lines if not line.startswith(("import ", "from "))]) < 200
