"""The walk through Open-Sora 2.0's training, as somebody new would try it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from longtake.data.shapes import make_shapes

ROOT = Path(__file__).resolve().parents[2]


def commands(section: str) -> list[str]:
    """The command lines of a section of the page, those for several processes left out."""
    page = (ROOT / "docs" / "opensora_v2.md").read_text(encoding="utf-8")
    (text,) = re.findall(rf"^## {section}.*?\n(.*?)^## ", page, re.DOTALL | re.MULTILINE)
    return re.findall(r"^longtake (.*)$", text, re.MULTILINE)


def test_the_page_leads_from_a_list_of_clips_to_a_trained_model(
    longtake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    made = make_shapes(tmp_path / "made", num_clips=12, num_stills=4)
    table = made.read_text(encoding="utf-8").splitlines()
    (tmp_path / "clips.csv").write_text(
        "\n".join([table[0], *(f"made/{line}" for line in table[1:])]) + "\n", encoding="utf-8"
    )
    probe, stats, train = [*commands("1. Clips"), *commands("2. Try it without a GPU")]
    stats += " --tiny"  # these clips are smaller than 256px
    for line, said in ((probe, "16 clips"), (stats, "16 of 16 clips used"), (train, "done at step 2")):
        code, out, err = longtake(*shlex.split(line))
        assert code == 0, err
        assert said in out


def test_tiny_goes_with_other_verbs(longtake):
    run = ROOT / "configs" / "opensora_v2" / "train" / "stage2.py"
    code, out, _ = longtake("config", "show", run, "--tiny", "--model.depth", "3", "--dataset.data-path", "x.parquet")
    assert code == 0
    assert "model.hidden_size = 128  # --tiny" in out
    assert "model.depth = 3  # --model.depth" in out
    assert re.search(r"^lr = 5e-05  # .*stage2.py:", out, re.MULTILINE)
