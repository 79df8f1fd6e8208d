"""docs/migrating.md says what the dialect does."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest

from longtake.dialects.opensora_v2 import inference as inference_words
from longtake.dialects.opensora_v2 import training as training_words
from longtake.dialects.opensora_v2.shared import PLUGIN_KEYS
from longtake.generate import resolve_source
from longtake.presets import run_file
from longtake.train import read_run
from tests.dialects.speech import ROOT, inference, training

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


def test_every_word_of_the_dialect_is_on_the_page() -> None:
    words = {f"plugin_config.{key}" for key in PLUGIN_KEYS}
    for module in (training_words, inference_words):
        words |= {*module.MOVED, *module.LEFT, *module.FIXED}
    words |= {*inference_words.ALIASES, "refine-prompt", "prompt_refine", "lora_config", "grad_ckpt_buffer_size"}
    listed = set(re.findall(r"`([A-Za-z_0-9.\-]+)[`= ]", PAGE))
    assert words - listed == set()
