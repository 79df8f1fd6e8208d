"""A published path as `_base_`, wherever a run file is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from longtake.cluster.arguments import name_and_folder
from longtake.config.load import load_config
from longtake.presets import FOLDER
from longtake.train.config import RunWithoutTable
from longtake.train.run_file import read_run

PUBLISHED = {
    "configs/diffusion/train/stage1.py": "opensora_v2/train/stage1",
    "../configs/diffusion/train/image.py": "opensora_v2/train/image",
    "/opt/Open-Sora/configs/diffusion/inference/256px.py": "opensora_v2/inference/256px",
    "configs/opensora-v1-2/train/stage1.py": "opensora_v1_2/train/stage1",
    "../configs/opensora-v1-2/lambda/stage3.py": "opensora_v1_2/train/lambda_3",
}


@pytest.mark.parametrize(("base", "preset"), PUBLISHED.items())
def test_published_base_is_read_without_a_dialect(base: str, preset: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(f'_base_ = "{base}"\n')
    tree = load_config(tmp_path / "mine.py", [], dict[str, Any]).tree
    assert tree == load_config(FOLDER / f"{preset}.py", [], dict[str, Any]).tree


def test_published_base_is_read_by_train_and_launch(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text('_base_ = "configs/diffusion/train/stage1.py"\nexp_name = "mine_too"\n')
    assert read_run(path, [], RunWithoutTable).value.exp_name == "mine_too"
    assert name_and_folder(["train", str(path)])[0] == "mine_too"


def test_base_below_configs_that_nobody_published_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text('_base_ = "configs/diffusion/train/stage9.py"\n')
    with pytest.raises(ValueError, match="does not exist"):
        load_config(tmp_path / "mine.py", [], dict[str, Any])
