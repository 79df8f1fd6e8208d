"""docs/migrating.md says what the dialect does."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest

from longtake.dialects.table import KeyRow
from longtake.generate.source import resolve_source
from longtake.presets import run_file
from longtake.train.run_file import read_run
from tests.dialects.speech import ROOT, inference, training
from tools import migrating_tables

PAGE = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8").partition("\n## TTT-Video")[0]
ROWS = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| `torchrun")]
OLD = re.compile(r"`torchrun --nproc_per_node (\d) scripts/diffusion/(train|inference).py (.*?)`")
NEW = re.compile(r"`(?:torchrun --nproc_per_node \d -m )?longtake (train|generate) (.*?)`")


def understood(line: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The config that an old command line means."""
    found = OLD.fullmatch(line)
    assert found, line
    size, script, words = found.groups()
    monkeypatch.setenv("WORLD_SIZE", size)
    run, *flags = shlex.split(words)
    if script == "inference":
        return inference(run, *flags)[0]
    table = flags.index("--dataset.data-path")  # `training` gives another one, which comes first
    assert flags[table + 1].endswith((".csv", ".parquet"))
    return training(run, *flags)[0]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:160])
def test_every_old_command_of_the_page_is_understood(row: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    config = understood(row[0], monkeypatch)
    new = NEW.search(row[1])
    if new is None or "opensora_v2/finetune " in row[1] or "epoch*" in row[0]:
        return
    monkeypatch.chdir(ROOT)
    verb, words = new.groups()
    run, *flags = shlex.split(words)
    if verb == "train":
        assert config == read_run(run_file(run), flags).value
    else:
        assert config == resolve_source(run_file(run, "inference"), flags).config


def test_the_page_has_commands() -> None:
    assert len(ROWS) >= 12


def test_table_cell_names_the_answer_to_its_key() -> None:
    row = KeyRow("a", ours="b.c", values={"x": "y"})
    assert migrating_tables.cell(row) == "`b.c`: `x` is `y`; others are refused"
    assert migrating_tables.cell(KeyRow("a", only=(False, None), reason="why")) == "refused unless False: why"
    assert migrating_tables.cell(KeyRow("a", note="grad_clip, --b_c")) == "not needed: `grad_clip`, `--b_c`"
    assert migrating_tables.name(KeyRow("a", default=0.5)) == "`a` (`0.5`)"
    assert migrating_tables.name(KeyRow("a", default=False)) == "`a`"
    with pytest.raises(ValueError, match="opensora_v2 training"):
        migrating_tables.page("<!-- keys: other -->\n<!-- end -->")
