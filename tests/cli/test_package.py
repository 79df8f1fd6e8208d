from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import typer

from longtake.cli.app import app
from longtake.presets import find_preset

ROOT = Path(__file__).parents[2]


def test_every_dependency_has_its_reason():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / "docs" / "dependencies.md").read_text()
    plain = re.findall(r"^\| (\w+) \| [^|]+ \|$", page, re.MULTILINE)
    extras = re.findall(r"^\| (\w+) \| ([^|]+) \| [^|]+ \|$", page, re.MULTILINE)
    assert set(plain) - {"package"} == {bare(line) for line in project["dependencies"]}
    told = {(extra, name.strip()) for extra, names in extras for name in names.split(",")} - {("extra", "package")}
    assert told == {(extra, bare(line)) for extra, lines in project["optional-dependencies"].items() for line in lines}


def test_the_readme_names_only_verbs_that_exist() -> None:
    commands = typer.main.get_command(app).commands
    readme = (ROOT / "README.md").read_text()
    named = set(re.findall(r"(?:`|-m |^)longtake ([a-z]+)", readme, re.MULTILINE))
    assert {"demo", "train", "generate", "plan"} <= named
    assert named <= {name for name, command in commands.items() if not command.hidden}


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_forecasts_of_the_readme_are_those_of_the_presets() -> None:
    """`tools/preset_forecasts.py` writes the forecast into a preset; its last line is the bucket of the most memory."""
    readme = (ROOT / "README.md").read_text()
    rows = re.findall(r"^\| [^|]+ \| `longtake train (\S+) [^|]*` \| ([\d.]+) GiB \|", readme, re.MULTILINE)
    assert len(rows) >= 6
    for preset, forecast in rows:
        lines = find_preset(preset, "train").read_text().splitlines()
        head = next(number for number, line in enumerate(lines) if "GiB a GPU" in line)
        behind = lines[head][: lines[head].index("GiB a GPU") + len("GiB a GPU")]
        assert lines[head + 1][: len(behind)].split()[-1] == forecast, preset


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))])
def test_every_link_of_a_page_leads_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(
        r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```$|`[^`]*`", "", text, flags=re.DOTALL | re.MULTILINE)
    ):
        if "://" in target:
            continue
        name, _, heading = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.exists(), target
        if heading:
            assert heading in anchors(path), target


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def bare(requirement: str) -> str:
    return re.split(r"[\[<>=~! ]", requirement)[0]
