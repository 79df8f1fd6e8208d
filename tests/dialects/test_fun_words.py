"""Every flag of CogVideoX-Fun's three scripts acts, is answered or is refused."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from shutil import copytree

import pytest

from longtake.contracts import UserError
from longtake.dialects.cogvideox_fun import CogVideoXFun
from longtake.dialects.cogvideox_fun.keys import ROWS, SCRIPTS, SIZES
from longtake.dialects.table import keys_of
from tests.dialects.fun import spoken, write_root
from tests.dialects.speech import refusal

KEYS = keys_of(ROWS)
SIZE_KEYS = set(keys_of(SIZES)) - {"train_batch_size"}
BARE = ("--tiny", "--use_peft_lora")
SCRIPT_OF = {
    "not_sigma_loss": "train_control",
    **dict.fromkeys(("trainable_modules", "trainable_modules_low_learning_rate"), "train"),
}
ACTS = [  # flags, place in the run, value there
    ("--train_data_meta y.csv", "dataset.data_path", "y.csv"),
    ("--train_data_dir /clips", "dataset.root", "/clips"),
    ("--output_dir out", "outputs", "out"),
    ("--seed 3", "seed", 3),
    ("--use_8bit_adam", "optim.states", "8bit"),
    ("--num_train_epochs 3", "epochs", 3),
    ("--max_train_steps=3", "max_steps", 3),
    ("--max_train_steps=30000 --num_train_epochs 3", "epochs", 10**9),
    ("--gradient_accumulation_steps 2", "accumulation_steps", 2),
    ("--gradient_checkpointing", "model.grad_ckpt_settings", (1000,)),
    ("--gradient_checkpointing", "model.recompute", "full"),
    ("--learning_rate 2e-5", "lr", 2e-5),
    ("--scale_lr --train_batch_size 2 --gradient_accumulation_steps 3 --learning_rate 1e-5", "lr", 6e-5),
    ("--lr_scheduler constant_with_warmup --lr_warmup_steps 10", "optim.schedule", ((0, 0.0), (10, 1e-4))),
    ("--lr_scheduler constant_with_warmup", "optim.schedule", ((0, 0.0), (500, 1e-4))),
    (
        "--lr_scheduler cosine --lr_warmup_steps 2 --max_train_steps 9",
        "optim.schedule",
        ((0, 0.0), (2, 1e-4, "cosine"), (9, 0.0)),
    ),
    ("--lr_scheduler linear --lr_warmup_steps 0 --max_train_steps 9", "optim.schedule", ((0, 1e-4), (9, 0.0))),
    ("--allow_tf32", "tf32", True),
    ("--adam_beta2 0.95", "optim.betas", (0.9, 0.95)),
    ("--adam_beta1 0.8", "optim.betas", (0.8, 0.999)),
    ("--adam_weight_decay 3e-2", "optim.weight_decay", 3e-2),
    ("--adam_epsilon 1e-10", "eps", 1e-10),
    ("--max_grad_norm 0.05", "grad_clip", 0.05),
    ("--trainable_modules . --max_grad_norm 0", "optim.clip", None),
    ("--dataloader_num_workers 3", "num_workers", 3),
    ("--mixed_precision bf16", "dtype", "bf16"),
    ("--mixed_precision no", "dtype", "fp32"),
    ("--report_to all", "wandb", True),
    ("--report_to wandb", "tensorboard", False),
    ("--report_to wandb --tracker_project_name p", "wandb_project", "p"),
    ("--checkpointing_steps 50", "ckpt_every", 50),
    ("--checkpoints_total_limit 2", "keep_n_latest", 2),
    ("--resume_from_checkpoint latest", "resume", "auto"),
    ("--rank 8", "lora.rank", 8),
    ("--network_alpha 4", "lora.alpha", 4),
    ("--rank 8 --network_alpha 0", "lora.alpha", 8),
    ("--target_name to_q,ff.0", "lora.targets", ("to_q", "ff.0")),
    ("--target_name to_q,attn", "lora.targets", ("to_q", "attn")),
    ("--uniform_sampling", "objective.uniform_sampling", True),
    ("--motion_sub_loss", "objective.motion_loss", 0.25),
    ("--motion_sub_loss --motion_sub_loss_ratio 0.5", "objective.motion_loss", 0.5),
    ("--train_sampling_steps 500", "objective.num_timesteps", 500),
    ("--snr_loss", "objective.min_snr_gamma", 5.0),
    ("--use_ema", "ema_decay", 0.9999),
    ("--prediction_type v_prediction", "objective.type", "v_prediction"),
    ("--train_mode inpaint", "condition_config", {"inpaint": 1.0}),
    ("--train_mode i2v", "condition_config", {"inpaint": 1.0}),
    ("--train_mode normal", "condition_config", None),
    ("--validation_prompts a b --validation_steps 7", "validation.prompts", ("a", "b")),
    ("--validation_prompts a --validation_steps 7", "validate_every", 7),
    ("--validation_prompts a --validation.negative_prompt b", "validation.negative_prompt", "b"),
    ("--validation_prompts a --validation_epochs 2", "validate_every_passes", 2),
    ("--validation_prompts a --validation_paths x.png --train_mode inpaint", "validation.references", ("x.png",)),
    ("--video_repeat 2", "dataset.video_repeat", 2),
    ("--trainable_modules attn1. ff.net.0.proj", "train_only", ("*attn1.*", "*ff.0*")),
    ("--trainable_modules .", "train_only", None),
    ("--trainable_modules_low_learning_rate attn1", "train_only", ("*attn1*",)),
    ("--trainable_modules . --abnormal_norm_clip_start 10", "optim.clip.steps", 10),
    ("--trainable_modules . --initial_grad_norm_ratio 3", "optim.clip.start", 3),
]
ANSWERED = [
    "--save_state",
    "--report_model_info --trainable_modules .",
    "--enable_text_encoder_in_dataloader",
    "--low_vram",
    "--lr_warmup_steps 10",
    "--token_sample_size 256",
    "--num_train_epochs 3 --max_train_steps 9",
    "--max_grad_norm 0",
    "--resume_from_checkpoint latest",
]
REFUSED = [  # flags, words of the sentence
    ("--revision main", "weights are read from a folder"),
    ("--variant fp16", "weights are read from a folder"),
    ("--non_ema_revision main", "weights are read from a folder"),
    ("--cache_dir x", "weights are read from a folder"),
    ("--hub_token x", "Longtake uploads nothing"),
    ("--hub_model_id x", "Longtake uploads nothing"),
    ("--push_to_hub", "Longtake uploads nothing"),
    ("--use_came", "AdamW is the optimizer"),
    ("--multi_stream", "a latent store saves it whole"),
    ("--train_text_encoder", "frozen, as it is there"),
    ("--random_flip", "does nothing there"),
    ("--noise_offset 0.1", "does nothing there"),
    ("--input_perturbation 0.1", "does nothing there"),
    ("--max_train_samples 3", "cut the table"),
    ("--prediction_type epsilon", "pure noise"),
    ("--not_sigma_loss --trainable_modules .", "does nothing there"),
    ("--logging_dir x", "tensorboard --logdir"),
    ("--mixed_precision fp16", 'write "bf16"'),
    ("--report_to comet_ml", "write tensorboard, wandb or all"),
    ("--tracker_project_name p", "write --report_to wandb too"),
    ("--motion_sub_loss_ratio 0.5", "write --motion_sub_loss too"),
    ("--lr_scheduler cosine --max_train_steps 300", "warms up for 500 steps, and the run has 300"),
    ("--target_name ,", "names no layer"),
    ("--lr_scheduler cosine", "write --max_train_steps N"),
    ("--lr_scheduler piecewise_constant", "must be one of constant"),
    ("--use_deepspeed", "accelerate launch --use_deepspeed"),
    ("--use_fsdp", "accelerate launch --use_fsdp"),
    ("--local_rank 3", "is not what the launcher says"),
    ("--train_mode loop", 'write "normal"'),
    ("--validation_steps 3", "write --validation_prompts too"),
    ("--pretrained_model_name_or_path nowhere", "is not a folder"),
    ("--resume_from_checkpoint checkpoint-3", "is not a checkpoint of the run"),
    ("--learning_rate fast", "must be a number"),
    ("--learn_rate 1", "did you mean --learning_rate"),
]
BY_FILES = {"transformer_path", "vae_path", "vae_mini_batch", "tokenizer_max_length"}  # which the tests below are of


def script_of(flags: str) -> str:
    named = set(re.findall(r"--(\w+)", flags))
    return next((script for name, script in SCRIPT_OF.items() if name in named), "train_lora")


@pytest.mark.parametrize(("flags", "place", "value"), ACTS)
def test_a_flag_acts(flags: str, place: str, value: object) -> None:
    script = script_of(flags)
    found: object = spoken(script, *BARE[: 1 + (script == "train_lora")], *flags.split())[0]
    for part in place.split("."):
        found = getattr(found, part)
    assert found == (pytest.approx(value) if isinstance(value, float) else value)


@pytest.mark.parametrize("flags", ANSWERED)
def test_a_flag_is_answered(flags: str) -> None:
    assert spoken(script_of(flags), "--tiny", *flags.split())[1].of(flags.split()[0].removeprefix("--"))


@pytest.mark.parametrize(("flags", "said"), REFUSED)
def test_a_flag_is_refused_with_the_reason(flags: str, said: str) -> None:
    assert said in refusal(spoken, script_of(flags), "--tiny", *flags.split())


def test_no_flag_is_forgotten() -> None:
    told = " ".join([flags for flags, *_ in ACTS + REFUSED] + ANSWERED + list(BARE))
    assert {key for script in SCRIPTS for key in keys_of(ROWS, script)} == set(KEYS)
    assert set(KEYS) - set(re.findall(r"--(\w+)", told)) - SIZE_KEYS - BY_FILES == set()


def test_a_flag_of_another_script_is_refused() -> None:
    assert "is not a flag of train.py" in refusal(spoken, "train", "--tiny", "--trainable_modules", ".", "--rank", "4")
    assert "--trainable_modules" in refusal(spoken, "train", "--tiny", "--pretrained_model_name_or_path", "nowhere")
    with pytest.raises(UserError, match="--pretrained_model_name_or_path is missing"):
        spoken("train_lora", "--rank", "4")


def test_one_mistake_is_one_sentence() -> None:
    assert len(refusal(spoken, "train_lora", "--tiny", "--random_hw_adapt").strip().splitlines()) == 1
    rule = "^--pretrained_model_name_or_path no where: is not a folder; give the folder of a whole CogVideoX.*$"
    with pytest.raises(UserError, match=rule):
        spoken("train_lora", "--pretrained_model_name_or_path", "no where", "--low_vram", "--train_mode", "inpaint")
    with pytest.raises(UserError, match="--train_data_meta is missing"):
        CogVideoXFun("train_lora").command(["train", "--tiny"])


def test_low_rate_modules_train_at_half_the_rate() -> None:
    flags = ("--trainable_modules", "attn", "--trainable_modules_low_learning_rate", "ff", "--learning_rate", "2e-5")
    config, _ = spoken("train", "--tiny", *flags)
    assert config.train_only == ("*attn*", "*ff*")
    (group,) = config.optim.groups
    assert (group.match, group.lr) == (("*ff*",), 1e-5)
    config, _ = spoken("train", "--tiny", *flags, "--lr_scheduler", "constant_with_warmup", "--lr_warmup_steps", "4")
    assert config.optim.groups[0].schedule == ((0, 0.0), (4, 1e-5))


def test_a_name_means_every_layer_that_has_it_where_peft_is_not_asked_for() -> None:
    assert spoken("train_lora", "--tiny", "--target_name", "attn1,ff.0")[0].lora.targets == ("*attn1*", "ff.0")
    config, heard = spoken("train_lora", "--tiny")
    assert "transformer_blocks.*" in config.lora.targets
    assert heard.of("target_name")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_root(tmp_path_factory.mktemp("fun"))


def test_the_published_folder_says_what_the_model_is(root: Path) -> None:
    start = ("--pretrained_model_name_or_path", str(root), "--target_name", "to_q")
    config, _ = spoken("train_lora", *start, "--vae_mini_batch", "1", "--tokenizer_max_length", "8", "--low_vram")
    assert (config.model.from_pretrained, config.model.visual, config.model.positions) == (str(root), "inpaint", "fun")
    assert (config.ae.scale_factor, config.ae.mini_batch, config.ae.placement) == (0.7, 1, "offloaded")
    assert (config.t5.max_length, config.t5.placement) == (8, "offloaded")
    assert config.objective.snr_shift == 1.0
    assert config.condition_config == {"t2v": 1.0}
    assert config.lora_files.keys() == {"diffusers", "comfy"}
    assert (config.sizes.batch_size, config.sizes.video_sample_stride, config.sizes.enable_bucket) == (16, 4, False)
    said = refusal(spoken, "train_control", *start[:2], "--trainable_modules", ".")
    assert "in other input channels than control videos need" in said


def test_the_data_modes_are_those_of_the_page(root: Path) -> None:
    modes = ("enable_bucket", "random_hw_adapt", "training_with_video_token_length", "random_frame_crop")
    modes += ("random_ratio_crop", "keep_all_node_same_token_length", "auto_tile_batch_size")
    numbers = {"video_sample_size": 256, "image_sample_size": 1024, "token_sample_size": 768}
    numbers |= {"video_sample_n_frames": 49, "video_sample_stride": 3}
    flags = [f"--{mode}" for mode in modes] + [f"--{name}={number}" for name, number in numbers.items()]
    start = ("--pretrained_model_name_or_path", str(root), "--use_peft_lora", "--train_batch_size", "2")
    sizes = spoken("train_lora", *start, *flags)[0].sizes
    assert {name: getattr(sizes, name) for name in SIZE_KEYS} == numbers | dict.fromkeys(modes, True)
    assert sizes.batch_size == 2
    assert "random_hw_adapt" in refusal(spoken, "train_lora", *start, "--enable_bucket", flags[2])


def test_other_weights_of_the_same_sizes(root: Path, tmp_path: Path) -> None:
    start = ("--pretrained_model_name_or_path", str(root), "--use_peft_lora")
    config, _ = spoken("train_lora", *start, "--transformer_path", "t.safetensors", "--vae_path", "v.safetensors")
    assert (config.model.from_pretrained, config.model.visual) == ("t.safetensors", "inpaint")
    assert (config.ae.from_pretrained, config.ae.scale_factor) == ("v.safetensors", 0.7)
    assert config.t5.from_pretrained == f"{root}/text_encoder"
    (tmp_path / "transformer").mkdir()
    with pytest.raises(UserError, match="has no scheduler, tokenizer"):
        spoken("train_lora", "--pretrained_model_name_or_path", str(tmp_path))
    copytree(root, tmp_path / "copy")
    (tmp_path / "copy" / "scheduler" / "scheduler_config.json").write_text('{"prediction_type": "epsilon"}')
    with pytest.raises(UserError, match=r"scheduler_config\.json: .* is trained here"):
        spoken("train_lora", "--pretrained_model_name_or_path", str(tmp_path / "copy"))


@pytest.mark.parametrize("value", ["[]", "{'a': {'b': 1}}", "-1", "True", "none", "a b"])
def test_no_value_of_a_flag_is_a_traceback(value: str) -> None:
    for key in KEYS:
        with suppress(UserError):
            spoken(next(script for script in SCRIPTS if key in keys_of(ROWS, script)), "--tiny", f"--{key}={value}")


def test_without_a_launcher_a_run_is_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("ACCELERATE", "FSDP"))]:
        monkeypatch.delenv(name)
    assert spoken("train_lora", *BARE)[0].dtype == "fp32"


def test_help_lists_the_flags_of_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        spoken("train_control", "--help")
    assert set(re.findall(r"--(\w+)", capsys.readouterr().out)) == set(keys_of(ROWS, "train_control"))
