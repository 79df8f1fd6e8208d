from __future__ import annotations

import re
import tomllib
from pathlib import Path

import typer

from longtake.cli.app import app

ROOT = Path(__file__).parents[2]


def test_every_dependency_has_its_reason():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / "docs" / "dependencies.md").read_text()
    plain = re.findall(r"^\| (\w+) \| [^|]+ \|$", page, re.MULTILINE)
    extras = re.findall(r"^\| (\w+) \| ([^|]+) \| [^|]+ \|$", page, re.MULTILINE)
    assert set(plain) - {"package"} == {bare(line) for line in project["dependencies"]}
    told = {(extra, name.strip()) for extra, names in extras for name in names.split(",")} - {("extra", "package")}
    assert told == {(extra, bare(line)) for extra, lines in project["optional-dependencies"].items() for line in lines}


def test_the_readme_names_only_verbs_that_exist_and_all_of_them():
    commands = typer.main.get_command(app).commands
    readme = (ROOT / "README.md").read_text()
    named = set(re.findall(r"(?:`|-m |^)longtake ([a-z]+)", readme, re.MULTILINE))
    assert named == {name for name, command in commands.items() if not command.hidden}


def test_every_link_of_the_readme_leads_somewhere():
    for target in re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text()):
        assert target.startswith("docs/images/") or (ROOT / target).exists()  # pictures are made by the demo


def bare(requirement: str) -> str:
    return re.split(r"[\[<>=~! ]", requirement)[0]
