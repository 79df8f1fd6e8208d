"""TTT-Video's TOML files and flags: what each word becomes, and which are refused."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from longtake.config.faults import ConfigError
from longtake.contracts import UserError
from longtake.dialects.ttt_video import TTTVideoDialect
from longtake.dialects.ttt_video.keys import rows_of
from longtake.dialects.ttt_video.training import schedule
from longtake.generate.config import GenerateConfig
from longtake.presets import FOLDER
from longtake.train.config import RunConfig
from longtake.train.optimizer.schedule import learning_rate, rate_between
from longtake.train.run_file import read_run
from tests.dialects.speech import Heard

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "ttt_video"
PRESETS = json.loads((GOLDEN / "presets.json").read_text())
FILES = [name for name in PRESETS if name.startswith("configs/")]


def placed(name: str) -> Path:
    return FOLDER / name.removeprefix("configs/")


def spoken(file: str | Path, *flags: str) -> tuple[RunConfig, Heard]:
    """The run that a command line of train.py means."""
    heard = Heard()
    dialect = TTTVideoDialect(heard.lines.append)
    own = ["--job.config_file", str(file), "--training.jsonl_paths", "x.jsonl", "--wandb.disable"]
    _, run, *words = dialect.command(["train", *own, *flags])
    return read_run(run, words, dialect=dialect).value, heard


def faults(*flags: str, file: str = "configs/train/ttt-mlp/9s.toml") -> str:
    with pytest.raises(ConfigError) as error:
        spoken(placed(file), *flags)
    return str(error.value)


@pytest.mark.parametrize("name", FILES)
def test_a_shipped_file_is_toml_and_says_what_the_published_one_does(name: str) -> None:
    """But for what is left to the command line, the W&B team, and mini-batches of 16 for weights trained with 64."""
    found = tomllib.loads(placed(name).read_text())
    known = {row.key: row.default for row in rows_of("generate" if "/eval/" in name else "train")}
    for section, keys in PRESETS[name]["changed"].items():
        for key, value in keys.items():
            if value == "TODO" or key == "entity":
                assert key not in found.get(section, {})
            elif "/eval/ttt-mlp" in name and key == "mini_batch_size":
                assert found[section][key] == 64
            else:
                assert found[section][key] == value
    for section, keys in found.items():
        for key, value in keys.items():
            changed = PRESETS[name]["changed"].get(section, {})
            assert key in changed or value == known[f"{section}.{key}"], (section, key)


@pytest.mark.parametrize("plan", json.loads((GOLDEN / "learning_rates.json").read_text())["plans"])
def test_rates_are_the_published_ones_up_to_the_last_step(plan: dict[str, Any]) -> None:
    for rate, law, group in (("lr_ssm", "lr_ssm_schedule", "ttt"), ("lr", "lr_schedule", "other")):
        points = schedule(plan[rate], plan["lr_end"], plan[law], plan["warmup"], plan["steps"])
        for step, wanted in zip(plan["step"], plan[group], strict=True):
            if step <= plan["steps"]:
                assert rate_between(points, step) == pytest.approx(wanted, rel=1e-9, abs=1e-20)


def test_a_stage_of_the_toml_files_is_the_preset_of_that_stage() -> None:
    config, heard = spoken(placed("configs/train/ttt-linear/63s.toml"))
    preset = read_run(str(FOLDER / "ttt_video/train/ttt_linear/63s.py"), ["--dataset.data-path", "x.jsonl"]).value
    own = {"dataset", "outputs", "exp_name", "epochs", "wandb", "wandb_project", "watchdog_seconds", "optim"}
    own |= {"dropout_ratio"}  # without the embedding of the empty prompt
    model = preset.model.model_copy(update={"from_pretrained": None})
    for key in RunConfig.model_fields.keys() - own:
        wanted = model if key == "model" else getattr(preset, key)
        assert getattr(config, key) == wanted, key
    for found, wanted in zip(config.optim.groups, preset.optim.groups, strict=True):
        assert (found.match, found.name, found.weight_decay) == (wanted.match, wanted.name, wanted.weight_decay)
        for step in (0, 7, 24, 25, 100, 249, 250):
            rates = learning_rate(config, step, found), learning_rate(preset, step, wanted)
            assert rates[0] == pytest.approx(rates[1], rel=1e-12)
    assert (config.dataset.data_path, config.dataset.latents) == ("x.jsonl", "x.jsonl")
    assert config.exp_name == "cogvideo-linear-63s"
    assert any("scan_checkpoint_group_size" in line for line in heard.lines)


def test_text_dropout_without_an_empty_prompt_is_off_and_named() -> None:
    file = placed("configs/train/ttt-mlp/9s.toml")
    config, heard = spoken(file)
    assert config.dropout_ratio["t5"] == 0
    assert "dropout_ratio.t5 = 0" in heard.of("training.empty_prompt")
    for flag in ("--training.empty_prompt=empty.pt", "--t5.from_pretrained=T5", "--dropout_ratio.t5=0.1"):
        config, heard = spoken(file, flag)
        assert config.dropout_ratio["t5"] == 0.1
        assert not any(line.startswith("training.empty_prompt") for line in heard.lines)


@pytest.mark.parametrize(("file", "is_named"), [("ttt-linear/3s", True), ("ttt-mlp/3s", False), ("ttt-mlp/9s", False)])
def test_first_stage_that_trains_a_part_of_the_weights_is_named(file: str, is_named: bool) -> None:
    _, heard = spoken(placed(f"configs/train/{file}.toml"))
    assert any(line.startswith("training.adapter_method") for line in heard.lines) == is_named


def test_flags_outrank_the_file(tmp_path: Path) -> None:
    flags = ["--training.global_batch_size=8", "--parallelism.tp_sharding", "1", "--model.ttt_base_lr=0.2"]
    flags += [f"--job.dump_folder={tmp_path}", "--job.exp_name=007", "--checkpoint.timeout_minutes=240"]
    config, _ = spoken(placed("configs/train/ttt-mlp/9s.toml"), *flags, "--checkpoint.resume")
    assert (config.slots_per_step, config.parallel.tensor, config.model.ttt_base_lr) == (8, 1, 0.2)
    assert (config.outputs, config.exp_name, config.resume) == (str(tmp_path), "007", "auto")
    assert config.time_limit == 240


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--training.adapter_method", "lora"], 'adapter_method = "lora" .*write sft for all, or qkvo'),
        (["--optimizer.lr_schedule", "step"], "must be one of cosine, linear"),
        (["--model.video_length", "12sec"], "must be one of 3sec, 9sec, 18sec, 30sec, 63sec"),
        (
            ["--parallelism.fsdp_unsharded_dtype", "float16"],
            "must be one of bfloat16, float32; bf16 needs no loss scale",
        ),
        (["--training.steps", "many"], "training.steps.* must be a whole number"),
        (["--job.dump_folder", "here"], "must be absolute; write .*here"),
        (["--checkpoint.init_state_dir", "nowhere"], "does not exist; give the folder of a checkpoint"),
        (["--checkpoint.resume", "--checkpoint.resume_step", "7"], "has no whole checkpoint of this step"),
        (["--optimizer.name", "SGD"], "must be .AdamW. here"),
    ],
)
def test_what_has_no_counterpart_is_refused(flags: list[str], said: str) -> None:
    text = faults(*flags)
    assert re.search(said, text), text


def test_a_word_that_there_is_not_is_refused_with_those_there_are(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text('[training]\nadapter_method = "sft"\nbatch = 8\n')
    with pytest.raises(ConfigError, match=r"training\.batch = 8 .*choose .*global_batch_size"):
        spoken(tmp_path / "own.toml")


def test_default_yields_to_a_key_of_longtake_in_the_file(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text('slots_per_step = 4\n[training]\nadapter_method = "sft"\n')
    assert spoken(tmp_path / "own.toml")[0].slots_per_step == 4
    (tmp_path / "own.toml").write_text("slots_per_step = 4\n[training]\nglobal_batch_size = 6\n")
    with pytest.raises(ConfigError, match="keep one of the two"):
        spoken(tmp_path / "own.toml")


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(UserError, match="there is no such file"):
        spoken("configs/none.toml")


def test_sampling_has_the_published_words() -> None:
    from longtake.generate.read import read_generation

    heard = Heard()
    dialect = TTTVideoDialect(heard.lines.append)
    own = ["--job.config_file", str(placed("configs/eval/ttt-mlp/18s.toml")), "--eval.input_file", "story.json"]
    own += ["--guider.scale", "4", "--eval.num_denoising_steps=20", "--eval.output_dir", "out", "--wandb.disable"]
    own += ["--checkpoint.init_state_dir", ".", "--discretization.shift_scale=3"]
    _, run, *words = dialect.command(["generate", *own])
    config: GenerateConfig = read_generation(run, words, dialect=dialect).value
    option = config.sampling_option
    assert (option.num_frames, option.num_steps, option.guidance, option.resolution) == (289, 20, 4.0, "480x720")
    assert (config.prompts, config.save_dir, config.fps_save) == ("story.json", "out/cogvideo-mlp-18s", 16)
    assert config.prompt_folders
    assert (config.objective.snr_shift, config.objective.solver_snr_shift) == (1.0, 3.0)  # v is read as in training
    assert (config.model.mini_batch_size, config.t5.max_length, config.ae.scale_factor) == (64, 471, 1.0)


def test_a_line_of_the_page_is_the_command_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights").mkdir()
    config, _ = spoken(placed("configs/train/ttt-mlp/3s.toml"), "--checkpoint.init_state_dir", "weights")
    flags = ["--dataset.data-path", "x.jsonl", "--dataset.latents", "x.jsonl", "--model.from-pretrained", "weights"]
    beside = read_run(str(FOLDER / "ttt_video/train/ttt_mlp/3s.py"), flags).value
    assert (config.model, config.dataset, config.train_only) == (beside.model, beside.dataset, beside.train_only)
