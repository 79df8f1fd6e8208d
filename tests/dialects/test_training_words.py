from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import pytest

from longtake.contracts import UserError
from longtake.dialects.opensora_v2 import keys
from longtake.dialects.table import keys_of
from longtake.presets import FOLDER
from tests.dialects.speech import TRAINING, refusal, training, write

PRESET = "configs/diffusion/train/stage2.py"


def test_a_file_in_the_old_words_is_the_preset_that_says_the_same(tmp_path: Path) -> None:
    config, heard = training(write(tmp_path, TRAINING))
    assert (config.parallel.tensor, config.parallel.sequence, config.parallel.sequence_attention) == (1, 4, "ring")
    assert (config.parallel.zero, config.grad_clip, config.optim.lr, config.optim.eps) == (2, 1.0, 5e-5, 1e-15)
    assert (config.model.grad_ckpt_settings, config.model.recompute) == ((100, 100), "full")
    assert config.model.grad_ckpt_buffer_size == 50 * 2**30
    assert "53,687,091,200 bytes" in heard.of("grad_ckpt_buffer_size")
    preset, said = training(PRESET)
    assert said.lines == [f"{PRESET}: read as {_shown(FOLDER / 'opensora_v2' / 'train' / 'stage2.py')}"]
    assert config.parallel == preset.parallel.model_copy(update={"sequence_attention": "ring", "zero": 2})
    assert config.ae == preset.ae.model_copy(update={"sample_size": 256})  # the published, which are slower
    for key in ("optim", "dropout_ratio", "warmup_steps", "seed", "dtype", "epochs", "keep_n_latest"):
        assert getattr(config, key) == getattr(preset, key), key


def _shown(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def test_every_word_that_is_not_needed_is_answered_with_one_line(tmp_path: Path) -> None:
    _, heard = training(write(tmp_path, TRAINING))
    expected = (
        *("pin_memory_cache_pre_alloc_numels", "num_bucket_build_workers", "save_master_weights", "is_causal_vae"),
        *("load_master_weights", "update_warmup_steps", "optim.cls", "dataset.type", "plugin_config.static_graph"),
        *("plugin_config.reduce_bucket_size_in_m", "plugin_config.overlap_allgather", "grad_ckpt_buffer_size"),
    )
    assert sorted(line.split(" = ")[0] for line in heard.lines) == sorted(expected)
    assert all("mine.py:" in line for line in heard.lines)


@pytest.mark.parametrize(
    ("flags", "place", "value"),
    [
        (("--lr", "1e-4"), "optim.lr", 1e-4),
        (("--grad_ckpt_setting", "(3,5)"), "model.grad_ckpt_settings", (3, 5)),
        (("--grad_ckpt_settings", "(3,5)"), "model.grad_ckpt_settings", (3, 5)),
        (("--model.grad_ckpt_setting", "(3,5)"), "model.grad_ckpt_settings", (3, 5)),
        (("--grad_ckpt_buffer_size", "1000"), "model.grad_ckpt_buffer_size", 2000),
        (("--grad_ckpt_buffer_size", "1000", "--dtype", "fp32"), "model.grad_ckpt_buffer_size", 4000),
        (("--model.grad_ckpt_buffer_size", "1000"), "model.grad_ckpt_buffer_size", 1000),
        (("--grad_checkpoint", "False"), "model.grad_ckpt_settings", None),
        (("--grad_checkpoint", "False"), "model.recompute", "none"),
        (("--model.recompute", "selective"), "model.recompute", "selective"),
        (("--sigma_min", "1e-3"), "objective.sigma_min", 1e-3),
        (("--plugin_config.sp_size", "2"), "parallel.sequence", 2),
        (("--plugin_config.sequence_parallelism_mode", "all_to_all"), "parallel.sequence_attention", "ulysses"),
        (
            ("--plugin_config.enable_sequence_parallelism", "False", "--plugin_config.sp_size", "2"),
            "parallel.sequence",
            1,
        ),
        (("--plugin_config.tp_size", "2"), "parallel.tensor", 2),
        (("--plugin_config.zero_stage", "1"), "parallel.zero", 2),
        (("--wandb", "True"), "wandb", True),
        (("--async-io", "True"), "async_io", True),
        (("--start-step", "0"), "start_step", 0),
        (("--start-epoch", "0"), "start_epoch", 0),
        (("--dataset.memory_efficient", "True"), "dataset.memory_efficient", True),
        (("--prefetch_factor", "none"), "prefetch_factor", 2),
        (("--lora_checkpoint", "adapters"), "lora.from_pretrained", "adapters"),
        (("--keep_n_latest", "3"), "keep_n_latest", 3),
        (("--ckpt_path", "w.safetensors"), "model.from_pretrained", "w.safetensors"),
    ],
)
def test_a_flag_in_the_old_words_counts_upon_a_preset(flags: tuple[str, ...], place: str, value: object) -> None:
    found: object = training(PRESET, *flags)[0]
    for part in place.split("."):
        found = getattr(found, part)
    assert found == value


def test_lr_counts_where_a_file_writes_the_rate_of_the_optimizer_as_a_number(tmp_path: Path) -> None:
    run = write(tmp_path, TRAINING.replace("lr=lr", "lr=1e-5"))
    assert training(run)[0].optim.lr == 1e-5
    config, heard = training(run, "--lr", "2e-5")
    assert config.optim.lr == 2e-5
    assert "in place of optim.lr = 1e-05" in heard.of("lr")


def test_what_is_written_higher_up_counts_in_whichever_words(tmp_path: Path) -> None:
    old = write(tmp_path, TRAINING, "old")
    new = write(tmp_path, "_base_ = 'old.py'\nparallel = dict(sequence=2)", "new")
    newest = write(tmp_path, "_base_ = 'new.py'\nplugin_config = dict(sp_size=8)", "newest")
    degrees = [training(run)[0].parallel.sequence for run in (old, new, newest)]
    assert degrees == [4, 2, 8]
    assert training(newest, "--parallel.sequence", "1")[0].parallel.sequence == 1
    clash = refusal(training, old, "--parallel.sequence", "1", "--plugin_config.sp_size", "2")
    assert clash == (
        "plugin_config.sp_size = 2 (--plugin_config.sp_size): contradicts parallel.sequence = 1 "
        "(--parallel.sequence); keep one of the two"
    )


def test_a_file_in_the_old_words_keeps_the_old_defaults(tmp_path: Path) -> None:
    lines = ("grad_clip", "eps = ", "grad_checkpoint")
    text = "\n".join(line for line in TRAINING.splitlines() if not line.startswith(lines))
    text = text.replace("eps=eps, ", "").replace("grad_ckpt_settings=(100, 100), ", "")
    config, heard = training(write(tmp_path, text))
    assert (config.grad_clip, config.optim.eps, config.model.grad_ckpt_settings) == (0, 1e-8, (100, 100))
    assert "Open-Sora's default is 0" in heard.of("grad_clip")
    assert training(PRESET)[0].grad_clip == 1


def test_adapters_in_pefts_words(tmp_path: Path) -> None:
    run = write(tmp_path, TRAINING + 'lora_config = dict(r=4, lora_alpha=8, target_modules=["q_proj"], bias="none")')
    lora = training(run)[0].lora
    assert lora is not None
    assert (lora.rank, lora.alpha, lora.targets) == (4, 8, ("q_proj",))
    lora = training(write(tmp_path, TRAINING + "lora_config = dict(use_dora=True)"))[0].lora
    assert lora is not None
    assert (lora.rank, lora.alpha, lora.targets, lora.dora) == (8, 8, None, True)
    assert training(write(tmp_path, TRAINING + "lora_config = None"))[0].lora is None
    lora = training(write(tmp_path, TRAINING + 'lora_config = dict(bias="none")'))[0].lora
    assert lora is not None
    assert lora.rank == 8


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--plugin_config.pp_size", "2"), "plugin_config.pp_size = 2 .* no pipeline parallelism"),
        (("--plugin", "gemini"), 'plugin = "gemini" .*: must be zero1, zero2 or hybrid'),
        (("--plugin_config.sequence_parallelism_mode", "split_gather"), "must be one of ring_attn, all_to_all"),
        (("--plugin_config.zero_stages", "2"), "plugin_config.zero_stages = 2 .*: unknown key; choose .*tp_size"),
        (("--optim.cls", "Lamb"), 'optim.cls = "Lamb" .*AdamW is the optimizer'),
        (("--cached_video", "True"), "cached_video = True .*longtake data encode"),
        (("--dataset.type", "cached_video_text"), "dataset.type = .*longtake data encode"),
        (("--nsys", "True"), "nsys = True .*nsys profile"),
        (("--is_causal_vae", "False"), "is_causal_vae = False .*high-compression"),
        (("--ae.type", "dc_ae"), 'ae.type = "dc_ae" .*no high-compression autoencoder'),
        (("--lora_config.lora_dropout", "0.1"), "lora_config.lora_dropout = 0.1 .*no dropout of their own"),
        (("--lora_config.target_modules", "q_proj"), r"lora_config.target_modules = .*write \['q_proj'\]"),
        (("--grad_checkpoint", "maybe"), "grad_checkpoint = .*: must be True or False"),
        (("--learning_rate", "1"), "learning_rate = 1 .*is no key"),
    ],
)
def test_what_has_no_counterpart_is_refused_in_a_sentence(flags: tuple[str, ...], said: str) -> None:
    assert re.search(said, refusal(training, PRESET, *flags))


ODD = ("[]", "{'a': {'b': 1}}", "-1", "True", "none", "a b")
KEYS = (
    *keys_of((*keys.MODEL, *keys.PLUGIN, *keys.ADAPTERS, *keys.TRAINING)),
    *("plugin_config", "lora_config", "ae", "optim", "dataset.data_path", "t5"),
)


@pytest.mark.parametrize("value", ODD)
def test_no_value_of_a_word_is_a_traceback(value: str, tmp_path: Path) -> None:
    run = write(tmp_path, TRAINING)
    for key in KEYS:
        with suppress(UserError):
            training(run, f"--{key}={value}")


def test_tiny_shrinks_a_file_in_the_old_words(tmp_path: Path) -> None:
    config, _ = training(write(tmp_path, TRAINING), "--tiny")
    assert (config.model.hidden_size, config.parallel.sequence, config.ae.type) == (128, 1, "pixel")
    assert config.model.grad_ckpt_buffer_size == 2**20
    assert training(write(tmp_path, TRAINING), "--tiny", "--plugin_config.sp_size", "2")[0].parallel.sequence == 2


def test_stages_may_be_in_the_old_words(tmp_path: Path) -> None:
    write(tmp_path, TRAINING, "old")
    stages = "stages = [dict(name='a', run='old.py', max_steps=1), dict(name='b', run='old.py', sigma_min=1e-3)]"
    run = write(tmp_path, f"plugin_config = dict(sp_size=2)\n{stages}", "all")
    config, _ = training(run, "--stage", "b", "--plugin_config.tp_size", "2")
    assert (config.parallel.sequence, config.parallel.tensor, config.objective.sigma_min) == (2, 2, 1e-3)
