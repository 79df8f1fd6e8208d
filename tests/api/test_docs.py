"""The examples of docs/python.md run as they are pasted, one after the other in one process."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from longtake.data.shapes import make_shapes

PAGE = Path(__file__).parents[2] / "docs" / "python.md"


def test_examples_of_the_page_run_as_a_notebook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    make_shapes(tmp_path, seed=10, num_clips=6, num_stills=2).rename("clips.csv")
    namespace: dict[str, Any] = {"__name__": "notebook"}
    examples = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    for text in examples:
        if "class Huber" in text:  # the page says to put it into a file
            Path("huber.py").write_text(text, encoding="utf-8")
        else:
            exec(compile(text, str(PAGE), "exec"), namespace)
    sys.modules.pop("huber")
    out = capsys.readouterr().out
    assert "8 clips, 0 files left out" in out
    assert namespace["video"].path.is_file()
    assert Path("own.safetensors").is_file()
    assert tuple(namespace["latents"].shape[:2]) == (1, namespace["transformer"].config.in_channels)
    assert namespace["robust"].checkpoint is not None
    assert out.splitlines()[-1].startswith('optim.lr "fast" must be a number')
