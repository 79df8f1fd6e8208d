"""`--tiny` next to weights: existing ones are left out with a line, and a mistyped path is an error in every script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from longtake.contracts import UserError
from longtake.dialects.cogvideox_fun import CogVideoXFun
from longtake.dialects.opensora_v1_2 import OpenSoraV12
from longtake.dialects.opensora_v2 import OpenSora
from longtake.dialects.ttt_video import TTTVideoDialect
from longtake.generate.read import read_generation
from longtake.train.run_file import read_run

LISTED = ["--training.jsonl_paths", "x.jsonl", "--training.adapter_method", "sft"]
CLIPS = ["--dataset.data-path", "x.csv"]
PROMPT = ["--prompt", "sea"]
FUN = ["train", "--train_data_meta", "x.csv"]
FLAGS = [  # dialect, command line up to the flag
    (OpenSora, ["train", "configs/diffusion/train/stage1.py", *CLIPS], "--model.from_pretrained"),
    (OpenSora, ["train", "configs/diffusion/train/stage1.py", *CLIPS], "--ckpt_path"),
    (OpenSora, ["generate", "configs/diffusion/inference/256px.py", *PROMPT], "--ckpt_path"),
    (OpenSoraV12, ["train", "configs/opensora-v1-2/train/stage1.py", *CLIPS], "--ckpt-path"),
    (OpenSoraV12, ["train", "configs/opensora-v1-2/train/stage1.py", *CLIPS], "--model.from_pretrained"),
    (OpenSoraV12, ["generate", "configs/opensora-v1-2/inference/sample.py", *PROMPT], "--ckpt-path"),
    (TTTVideoDialect, ["train", *LISTED], "--checkpoint.init_state_dir"),
    (TTTVideoDialect, ["train", *LISTED], "--model.from_pretrained"),
    (TTTVideoDialect, ["generate", *PROMPT], "--eval.t5_model_dir"),
    (lambda say: CogVideoXFun("train_lora", say), FUN, "--transformer_path"),
    (lambda say: CogVideoXFun("train_lora", say), FUN, "--vae_path"),
    (lambda say: CogVideoXFun("train_lora", say), FUN, "--pretrained_model_name_or_path"),
    (lambda say: CogVideoXFun("train_lora", say), FUN, "--model.from_pretrained"),
]
IDS = [f"{start[0]} {flag}" for _, start, flag in FLAGS]


def read(make: Any, start: list[str], *flags: str) -> tuple[Any, list[str]]:
    """The config of a command line, and the lines about its words."""
    lines: list[str] = []
    dialect = make(lines.append)
    verb, run, *words = dialect.command([*start, *flags])
    reader = read_run if verb == "train" else read_generation
    return reader(run, words, dialect=dialect).value, lines


@pytest.mark.parametrize(("make", "start", "flag"), FLAGS, ids=IDS)
def test_tiny_with_a_missing_path_of_weights_is_refused(make: Any, start: list[str], flag: str) -> None:
    with pytest.raises(UserError) as error:
        read(make, start, "--tiny", flag, "ckpts/no/such.safetensors")
    assert "no/such.safetensors" in str(error.value)


@pytest.mark.parametrize(("make", "start", "flag"), [case for case in FLAGS if "pretrained_model" not in case[2]])
def test_tiny_with_existing_weights_leaves_them_out(make: Any, start: list[str], flag: str, tmp_path: Path) -> None:
    if "t5_model_dir" in flag:
        pytest.skip("tiny encoders have no weights in any case")
    (tmp_path / "real.safetensors").touch()
    config, lines = read(make, start, "--tiny", flag, str(tmp_path / "real.safetensors"))
    assert config.model.from_pretrained is None
    assert any("--tiny leaves its weights out" in line for line in lines)
