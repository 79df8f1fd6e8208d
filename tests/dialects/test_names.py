"""Errors behind another system's command line: keys by the names that were typed, and what a mistyped flag meant."""

from __future__ import annotations

import pytest

from longtake.contracts import UserError
from longtake.dialects.cogvideox_fun import CogVideoXFun
from longtake.dialects.cogvideox_fun.keys import ROWS, SCRIPTS
from longtake.dialects.names import restate
from longtake.dialects.opensora_v1_2 import OpenSoraV12
from longtake.dialects.opensora_v1_2.keys import flags_of
from longtake.dialects.table import keys_of
from longtake.dialects.ttt_video import TTTVideoDialect
from longtake.dialects.ttt_video.keys import rows_of
from longtake.train.run_file import read_run


def swapped(name: str) -> str:
    """The name with the two letters in its middle swapped, or one doubled where they are equal."""
    middle = len(name) // 2
    pair = name[middle - 1 : middle + 1]
    return name[: middle - 1] + (pair[::-1] if pair[0] != pair[1] else pair[0] * 3) + name[middle + 1 :]


def commands() -> list[tuple[object, list[str], str]]:
    """(dialect, command line, flag) of every flag of every script."""
    cases: list[tuple[object, list[str], str]] = []
    for script in SCRIPTS:
        start = ["train", "--tiny", "--train_data_meta", "x.csv"]
        cases += [(CogVideoXFun(script), start, name) for name in keys_of(ROWS, script)]
    for verb in ("train", "generate"):
        cases += [(TTTVideoDialect(), [verb], row.key) for row in rows_of(verb)]
    for verb, run in (("train", "train/stage1"), ("generate", "inference/sample")):
        cases += [(OpenSoraV12(), [verb, f"configs/opensora-v1-2/{run}.py"], name) for name in flags_of(verb)]
    return cases


def test_flag_with_a_typo_of_every_script_is_refused_with_the_flag_meant() -> None:
    for dialect, start, name in commands():
        section, dot, key = name.rpartition(".")
        mistyped = f"{section}{dot}{swapped(key)}"
        with pytest.raises(UserError) as error:
            dialect.command([*start, f"--{mistyped}", "1"])
        assert str(error.value).startswith(f"--{mistyped}: "), name
        assert str(error.value).endswith(f"did you mean --{name}?"), name


def test_flags_of_longtake_behind_a_script_are_no_typos() -> None:
    dialect = CogVideoXFun("train_lora")
    words = dialect.command(["train", "--tiny", "--train_data_meta", "x.csv", "--lora.rank", "3", "--optim.lr", "1"])
    assert words[-4:] == ["--lora.rank", "3", "--optim.lr", "1"]


def test_lambda_flags_are_named_as_typed() -> None:
    dialect = OpenSoraV12(lambda line: None)
    dialect.command(["train", "configs/opensora-v1-2/lambda/stage1.py", "--ckpt-path", "x.pth", "--data-path", "x.csv"])
    message = restate(
        "model.from_pretrained = 'x.pth': no such file; dataset.data_path = 'x.csv': no", dialect.typed_names
    )
    assert message == "--ckpt-path = 'x.pth': no such file; --data-path = 'x.csv': no"


def test_restate_key_that_was_typed_under_another_name_takes_that_name() -> None:
    dialect = CogVideoXFun("train_lora", lambda line: None)
    flags = ["--train_data_meta", "x.csv", "--target_name", "to_q", "--rank", "3", "--max_train_steps", "2"]
    _, run, *words = dialect.command(["train", "--tiny", *flags])
    read_run(run, words, dialect=dialect)
    names = dialect.typed_names
    assert names["lora.targets"] == "--target_name"
    assert names["lora.rank"] == "--rank"
    assert "seed" not in names
    message = restate("lora.rank = 0 (--rank): more; write --lora.targets x; lora.targets.y; max_steps = 2", names)
    assert message == "--rank = 0: more; write --target_name x; lora.targets.y; --max_train_steps = 2"
    assert restate("outputs/x: cannot load; epochs go on", {"outputs": "-a", "load": "-b", "epochs": "-c"}) == (
        "outputs/x: cannot load; epochs go on"
    )


def test_flag_without_its_value_is_named_and_a_value_of_a_flag_alone_too() -> None:
    fun, ttt, lambda_run = CogVideoXFun("train_lora"), TTTVideoDialect(), "configs/opensora-v1-2/train/stage1.py"
    meta = ["train", "--tiny", "--train_data_meta", "x.csv"]
    for dialect, words, start in (
        (fun, ["train", "--tiny", "--train_data_meta"], "--train_data_meta: needs a value"),
        (fun, [*meta, "--video_sample_size"], "--video_sample_size: needs a value"),
        (fun, [*meta, "--scale_lr", "True"], '--scale_lr "True": the flag takes no value'),
        (ttt, ["train", "--training.jsonl_paths"], "--training.jsonl_paths: needs a value"),
        (ttt, ["train", "--job.config_file"], "--job.config_file: needs a value"),
        (OpenSoraV12(), ["train", lambda_run, "--data-path"], "--data-path: needs a value"),
        (OpenSoraV12(), ["train", lambda_run, "--start-from-scratch", "1"], '--start-from-scratch "1": the flag takes'),
    ):
        with pytest.raises(UserError) as error:
            dialect.command(words)
        assert str(error.value).startswith(start)


def test_choice_that_is_a_list_or_missing_is_refused_by_its_key() -> None:
    dialect = TTTVideoDialect(lambda line: None)
    _, run, *flags = dialect.command(["train", "--tiny", "--model.size", "[1,2]"])
    with pytest.raises(UserError) as error:
        read_run(run, flags, dialect=dialect)
    lines = str(error.value).splitlines()
    assert any(line.startswith("model.size = [1, 2] (--model.size): must be one of") for line in lines)
    assert any(line.startswith("training.adapter_method: names the weights") for line in lines)
