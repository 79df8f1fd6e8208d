"""Open-Sora 1.2's run files and flags, and Lambda's: what each word becomes, and which are refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from longtake.config.faults import ConfigError
from longtake.contracts import UserError
from longtake.dialects.opensora_v1_2 import OpenSoraV12
from longtake.presets import find_preset
from longtake.train.config import RunConfig
from longtake.train.optimizer.schedule import learning_rate
from longtake.train.run_file import read_run
from tests.buckets.tables import golden
from tests.cli.conftest import longtake
from tests.dialects.speech import Heard, write
from tests.dialects.test_v1_2_inference_words import FILE as SAMPLE
from tests.precision import rounding

__all__ = ["longtake"]

TABLES = golden("bucket_tables.json", "opensora_v1_2")
MASKS = golden("masks.json", "opensora_v1_2")["sets"]
PLACES = {
    **{f"train/stage{number}": f"stage{number}" for number in (1, 2, 3)},
    **{f"lambda/stage{number}": f"lambda_{number}" for number in range(1, 8)},
    "train/stage7": "lambda_7",
}
SHARED = """
dataset = dict(type="VariableVideoTextDataset", transform_name="resize_crop")
grad_checkpoint = True
num_workers = 8
num_bucket_build_workers = 16
dtype = "bf16"
plugin = "zero2"
model = dict(
    type="STDiT3-XL/2", from_pretrained=None, qk_norm=True, enable_flash_attn=True, enable_layernorm_kernel=True,
    freeze_y_embedder=True,
)
vae = dict(
    type="OpenSoraVAE_V1_2", from_pretrained="hpcai-tech/OpenSora-VAE-v1.2", micro_frame_size=17, micro_batch_size=4
)
text_encoder = dict(type="t5", from_pretrained="DeepFloyd/t5-v1_1-xxl", model_max_length=300, shardformer=True)
scheduler = dict(type="rflow", use_timestep_transform=True, sample_method="logit-normal")
seed = 42
outputs = "outputs"
wandb = False
log_every = 10
load = None
grad_clip = 1.0
ema_decay = 0.99
adam_eps = 1e-15
"""
CYCLE = 'lr_schedule = "1cycle"\nanneal_strategy = "cos"\ncooldown_steps = 400\nmin_lr = 1.6e-5\n'


def old_file(name: str) -> str:
    """A published training file in its own keys, of the tables that golden data has."""
    number = int(name[-1])
    number = 6 if number == 7 else number
    table = TABLES[f"B{(number - 1) % 3 + 1}"]["table"]
    buckets = {res: {int(t): tuple(_tuples(entry)) for t, entry in of.items()} for res, of in table.items()}
    kinds = MASKS[f"train/stage{(number - 1) % 3 + 1}"]["order_ratio_cumulative"]
    masks = {kind: ratio for kind, ratio, _ in kinds if kind != "identity"}
    own: dict[str, Any] = {"epochs": 1000, "ckpt_every": 200, "lr": 1e-4, "warmup_steps": 1000}
    if name == "stage2":
        del own["warmup_steps"]
    text = SHARED
    if name.startswith("lambda"):
        rates, warm = (1.6e-4, 1.6e-4, 2e-4, 1.6e-4, 1.6e-4, 0.8e-4), 1000 if number == 3 else 400
        epochs = read_run(str(find_preset(f"opensora_v1_2/{name}")), ["--dataset.data-path", "x"]).value.epochs
        own = {"epochs": epochs, "ckpt_every": 100, "lr": rates[number - 1], "warmup_steps": warm, "weight_decay": 0.01}
    if number > 3:
        masks, text = {"random": 0.0}, text + CYCLE + f"max_lr = {3.2e-4 if number == 6 else 6.4e-4}\n"
    own |= {"bucket_config": buckets, "mask_ratios": masks}
    return text + "".join(f"{key} = {value!r}\n" for key, value in own.items())


def _tuples(entry: list[Any]) -> list[Any]:
    return [tuple(part) if isinstance(part, list) else part for part in entry]


@pytest.fixture(autouse=True)
def no_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has never seen `wandb login`."""
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def spoken(run: str | Path, *flags: str) -> tuple[RunConfig, Heard]:
    """The run that a command line of scripts/train.py means."""
    heard = Heard()
    dialect = OpenSoraV12(heard.lines.append)
    _, found, *words = dialect.command(["train", str(run), "--data-path", "x.csv", *flags])
    return read_run(found, words, dialect=dialect).value, heard


def preset(name: str) -> RunConfig:
    return read_run(str(find_preset(f"opensora_v1_2/{name}")), ["--dataset.data-path", "x.csv"]).value


def differences(found: RunConfig, wanted: RunConfig) -> set[str]:
    return {key for key in RunConfig.model_fields if getattr(found, key) != getattr(wanted, key)}


@pytest.mark.parametrize("place", PLACES)
def test_an_old_path_is_the_preset_of_that_stage(place: str) -> None:
    config, heard = spoken(f"configs/opensora-v1-2/{place}.py")
    name = PLACES[place]
    of_lambda = name.startswith("lambda")
    assert differences(config, preset(name)) == {"exp_name"} | ({"outputs"} if of_lambda else set())
    folder = "outputs_speedrun" if of_lambda else "outputs"
    assert (config.exp_name, config.outputs, config.wandb) == ("{n}-STDiT3-XL-2", folder, False)
    line, *more = heard.lines
    assert line.startswith(f"configs/opensora-v1-2/{place}.py: read as the preset opensora_v1_2/{name}")
    assert ("1,000 steps" in line) == (name == "lambda_3")
    assert ["no login" in said for said in more] == [True] * of_lambda


def test_runs_of_lambda_are_tracked_where_there_is_a_login(tmp_path: Path) -> None:
    stage = "configs/opensora-v1-2/lambda/stage1.py"
    (tmp_path / "netrc").write_text(f"machine api.wandb.ai login user password {40 * 'x'}\n")
    assert spoken(stage)[0].wandb
    assert not spoken(stage, "--wandb", "False")[0].wandb
    (tmp_path / "netrc").unlink()
    assert spoken(stage, "--wandb", "True")[0].wandb  # asked for, so a login that is missing is an error later
    own = write(tmp_path, old_file("lambda_1").replace("wandb = False", "wandb = True"))
    config, heard = spoken(own)
    assert not config.wandb
    assert "no login" in heard.of("wandb")


def test_names_of_runs_and_folders_of_a_file_or_flags_count(tmp_path: Path) -> None:
    config, _ = spoken("configs/opensora-v1-2/lambda/stage1.py", "--exp-name", "mine", "--outputs", "o")
    assert (config.exp_name, config.outputs) == ("mine", "o")
    config, _ = spoken(write(tmp_path, old_file("lambda_1") + 'exp_name = "mine"\n'))
    assert (config.exp_name, config.outputs) == ("mine", "outputs")
    config, _ = spoken(write(tmp_path, old_file("stage1").replace("STDiT3-XL/2", "STDiT3-3B/2")))
    assert config.exp_name == "{n}-STDiT3-3B-2"


@pytest.mark.parametrize("name", dict.fromkeys(PLACES.values()))
def test_a_file_in_the_old_keys_says_what_the_preset_says(name: str, tmp_path: Path) -> None:
    config, _ = spoken(write(tmp_path, old_file(name)), "--ckpt-path", "PixArt.pth")
    wanted = preset(name)
    rest = differences(config, wanted) - {"model", "exp_name", "optim", "max_steps"}  # the last: a hand stopped it
    rest -= {"compile", "parallel"}  # presets are faster
    assert rest <= {
        "condition_config",
        "warmup_steps",
        "lr",
    }  # shares are rounded; a schedule says both rates and warm-up
    assert config.condition_config == (wanted.condition_config and pytest.approx(wanted.condition_config))
    assert config.optim.weight_decay == wanted.optim.weight_decay
    for step in (0, 1, 200, 399, 400, 600, 800, 1200):
        assert learning_rate(config, step) == pytest.approx(learning_rate(wanted, step), rel=1e-12)
    own = {"from_pretrained": "PixArt.pth", "strict_load": False, "recompute": "full"}
    own |= {"grad_ckpt_settings": (28, 28)}
    assert config.model == wanted.model.model_copy(update=own)


@pytest.mark.parametrize("case", [0, 2, 3, 4, 5, 6])
def test_schedules_of_a_file_are_those_of_that_program(case: int, tmp_path: Path) -> None:
    expected = golden("lr.json.xz", "opensora_v1_2")[case]
    keys = {key: value for key, value in expected.items() if key not in ("kind", "steps", "values")}
    keys |= {"lr_schedule": "1cycle"} if expected["kind"] == "1cycle" else {}
    text = SHARED + 'bucket_config = {"144p": {1: (1.0, 4)}}\n' + "".join(f"{k} = {v!r}\n" for k, v in keys.items())
    config, _ = spoken(write(tmp_path, text))
    rates = [learning_rate(config, step) for step in range(expected["steps"])]
    assert rates == pytest.approx(expected["values"], rel=0, abs=rounding(max(rates)))  # its cosine is of float32


def test_what_a_file_leaves_out_is_as_it_was_there(tmp_path: Path) -> None:
    text = 'bucket_config = {"144p": {1: (1.0, 4)}}\nmodel = dict(type="STDiT3-3B/2")\nscheduler = dict(type="rflow")\n'
    config, heard = spoken(write(tmp_path, text))
    assert (config.grad_clip, config.eps, config.ema_decay, config.lr) == (0.0, 1e-8, 0.9999, 1e-4)
    assert (config.model.hidden_size, config.model.num_heads) == (1872, 26)
    assert (config.objective.sample_method, config.objective.use_timestep_transform) == ("uniform", False)
    assert (config.model.grad_ckpt_settings, config.freeze, config.warmup_steps) == (None, (), None)
    assert "grad_clip 0" in heard.of("not in the file, so as Open-Sora's defaults have it")


def test_flags_outrank_the_file_and_the_preset(tmp_path: Path) -> None:
    flags = ["--lr", "5e-5", "--warmup-steps", "100", "--outputs", "o", "--wandb", "True", "--seed=7"]
    config, heard = spoken("configs/opensora-v1-2/lambda/stage4.py", *flags, "--record-time", "--batch-size", "8")
    assert [learning_rate(config, step) for step in (0, 100, 500, 900)] == pytest.approx([1.6e-5, 6.4e-4, 5e-5, 5e-5])
    assert (config.outputs, config.wandb, config.seed) == ("o", True, 7)
    assert len(heard.lines) == 3
    assert (config.epochs, config.max_steps) == (3, None)  # as the page says
    config, _ = spoken("configs/opensora-v1-2/lambda/stage4.py", "--warmup-steps", "0")
    assert [learning_rate(config, step) for step in (0, 400)] == pytest.approx([6.4e-4, 1.6e-4])
    config, _ = spoken(write(tmp_path, old_file("lambda_1")), *flags, "--flash-attn", "False")
    assert (config.lr, config.warmup_steps, config.outputs, config.seed) == (5e-5, 100, "o", 7)


def test_load_and_start_from_scratch_are_as_the_page_says() -> None:
    config, _ = spoken("configs/opensora-v1-2/lambda/stage1.py", "--load", "outputs/x")
    assert (config.load, config.start_step) == ("outputs/x", None)
    config, _ = spoken("configs/opensora-v1-2/lambda/stage1.py", "--load", "outputs/x", "--start-from-scratch")
    assert (config.load, config.start_epoch, config.start_step) == ("outputs/x", 0, 0)
    config, heard = spoken("configs/opensora-v1-2/lambda/stage1.py", "--start-from-scratch")
    assert config.start_step is None
    assert "does nothing" in heard.of("--start-from-scratch")


def test_a_checkpoint_of_the_old_program_gives_its_weights_or_all(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "running_states.json").write_text("{}")
    config, _ = spoken("configs/opensora-v1-2/lambda/stage2.py", "--ckpt-path", str(tmp_path))
    assert config.model.from_pretrained == str(tmp_path / "model")
    (tmp_path / "running_states.json").unlink()  # as where the weights alone were copied
    config, _ = spoken("configs/opensora-v1-2/lambda/stage2.py", "--ckpt-path", str(tmp_path))
    assert config.model.from_pretrained == str(tmp_path / "model")
    config, _ = spoken("configs/opensora-v1-2/lambda/stage2.py", "--load", str(tmp_path), "--start-from-scratch")
    assert (config.load, config.start_epoch, config.start_step) == (str(tmp_path), 0, 0)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ('plugin = "zero3"', "must be zero2 or zero2-seq"),
        ("sp_size = 2", 'is for plugin = "zero2-seq"'),
        ('mask_ratios = {"image_head": 1.5}', "together at most 1"),
        ('lr_schedule = "cosine"', "must be 1cycle"),
        ('lr_schedule = "1cycle"\nmax_lr = 1e-3', "min_lr.* must be a number"),
        (
            'lr_schedule = "1cycle"\nmin_lr = max_lr = 1e-3\ncooldown_steps = 1\nwarmup_steps = 1.5',
            "must be a whole number",
        ),
        ('dataset = dict(type="VideoTextDataset")', "must be .*VariableVideoTextDataset"),
        ("dataset = dict(frame_interval=2)", "frames follow each other"),
        ('vae = dict(type="VideoAutoencoderKL")', "must be .*OpenSoraVAE_V1_2"),
        ("vae = dict(micro_size=1)", "unknown key; choose "),
        ('model = dict(type="STDiT2-XL/2")', "choose STDiT3-XL/2 or STDiT3-3B/2"),
        ("load_video_features = True", "longtake data encode"),
        ('scheduler = dict(type="iddpm")', "must be .*rflow"),
        ("lr_speed = 1", "lr_speed"),
    ],
)
def test_what_has_no_counterpart_is_refused(changed: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        spoken(write(tmp_path, f"{old_file('lambda_1')}\n{changed}\n"))
    assert re.search(said, str(error.value)), str(error.value)


SEARCH = """
base = ("512", "408")
base_step_time = 16
grad_checkpoint = True
bucket_config = {"144p": {1: (475, 0), 51: (51, 10)}, "240p": {1: (297, 200), 51: (20, 0)}}
dataset = dict(type="VariableVideoTextDataset", transform_name="resize_crop")
model = dict(type="STDiT3-XL/2", qk_norm=True)
scheduler = dict(type="rflow", use_timestep_transform=True, sample_method="logit-normal")
"""


def searched(run: str | Path, *flags: str) -> tuple[RunConfig, list[str], Heard]:
    """The run, and the words of `longtake plan` itself, that a command line of scripts/misc/search_bs.py means."""
    heard = Heard()
    dialect = OpenSoraV12(heard.lines.append)
    verb, found, *words = dialect.command(["plan", str(run), *flags])
    options = [word for word in words if not word.startswith("--") or "=" not in word]
    assert verb == "plan"
    return read_run(found, [word for word in words if "=" in word], dialect=dialect).value, options, heard


def test_the_published_search_is_one_for_its_step_time() -> None:
    config, options, heard = searched("configs/opensora-v1-2/misc/bs.py", "--data-path", "small.csv", "--seed", "7")
    assert options == ["--probe", "--target-step-seconds", "12", "--gpus", "1"]
    assert config.bucket_config == preset("stage2").bucket_config
    assert (config.dataset.data_path, config.seed) == ("small.csv", 7)
    assert heard.lines == ["configs/opensora-v1-2/misc/bs.py: read as the preset opensora_v1_2/stage2"]


def test_a_search_file_of_ones_own_says_buckets_goal_and_one_resolution(tmp_path: Path) -> None:
    own = write(tmp_path, SEARCH)
    config, options, heard = searched(own, "--data-path", "x.csv", "--ckpt-path", "w.pth", "--outputs", "o")
    assert options[1:3] == ["--target-step-seconds", "16"]
    assert config.bucket_config == {
        "144p": {1: (1.0, 475), 51: (1.0, 51)},
        "240p": {1: (1.0, 297), 51: (1.0, 20)},
    }
    assert heard.of("base").endswith("does nothing beside base_step_time, as there")
    assert "none are read" in heard.of("--ckpt-path")
    assert "nothing is written" in heard.of("--outputs")
    config, options, _ = searched(own, "--resolution", "240p", "--data-path", "x.csv", "--target-step-seconds", "3")
    assert list(config.bucket_config) == ["240p"]
    assert options == ["--probe", "--gpus", "1", "--target-step-seconds", "3"]
    with pytest.raises(ConfigError, match="choose 144p, 240p"):
        searched(own, "--resolution", "360p", "--data-path", "x.csv")


def test_a_search_without_a_goal_is_refused(tmp_path: Path) -> None:
    for line in ("", "base_step_time = None"):
        own = write(tmp_path, SEARCH.replace("base_step_time = 16", line))
        with pytest.raises(UserError, match=r"base_step_time is missing; write .* of base = \('512'"):
            searched(own)
    with pytest.raises(UserError, match="base_step_time is missing"):
        searched("configs/opensora-v1-2/train/stage1.py")
    with pytest.raises(UserError, match=r"run file is missing; .* configs/opensora-v1-2/misc/bs.py"):
        searched("--data-path", "x.csv")


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ("configs/opensora-v1-2/train/demo_360p.py", "_base_ is opensora_v1_2/stage1"),
        ("configs/opensora-v1-2/misc/bs.py", "longtake plan"),
        ("configs/opensora-v1-2/train/stage9.py", r"there are train/stage1\.py, .*lambda/stage7\.py"),
    ],
)
def test_a_file_without_a_counterpart_is_refused(run: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        spoken(run)


def test_other_verbs_read_a_file_in_the_old_keys_too(longtake: Any, tmp_path: Path) -> None:
    file = write(tmp_path, old_file("stage1"))
    words = ("--dataset.data-path", "clips.parquet")
    code, out, err = longtake("config", "show", file, *words)
    assert code == 0, err
    assert "objective.use_timestep_transform = True" in out
    assert "model.hidden_size = 1152" in out
    code, out, err = longtake("plan", file, "--gpus", 192, "--gpu", "h100", *words)
    assert code == 0, err
    assert "144p/102f" in out
    (tmp_path / "clips.csv").write_text("path,text,num_frames,height,width,fps\na.mp4,a,60,144,256,24\n")
    code, out, err = longtake("data", "stats", tmp_path / "clips.csv", "--run", file)
    assert code == 0, err
    assert "144p" in out
    code, out, err = longtake("config", "show", write(tmp_path, SAMPLE, "sample"))
    assert code == 0, err
    assert "sampling_option.resolution = '240p'" in out
