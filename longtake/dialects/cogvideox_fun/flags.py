"""CogVideoX-Fun's flags, as argparse takes them there, as flags of one value each."""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Sequence

SCRIPTS = ("train_lora", "train", "train_control")
_LISTS = {"validation_prompts", "validation_paths", "trainable_modules", "trainable_modules_low_learning_rate"}
_SWITCHES = {
    *("use_came", "use_8bit_adam", "multi_stream", "gradient_checkpointing", "scale_lr", "allow_tf32", "random_flip"),
    *("use_ema", "push_to_hub", "snr_loss", "use_peft_lora", "train_text_encoder", "uniform_sampling", "low_vram"),
    *("enable_text_encoder_in_dataloader", "enable_bucket", "random_ratio_crop", "random_frame_crop"),
    *("random_hw_adapt", "training_with_video_token_length", "auto_tile_batch_size", "motion_sub_loss", "save_state"),
    *("keep_all_node_same_token_length", "use_deepspeed", "use_fsdp", "report_model_info", "not_sigma_loss"),
}
_NUMBERS = {
    *("seed", "train_batch_size", "vae_mini_batch", "num_train_epochs", "max_train_steps", "learning_rate"),
    *("gradient_accumulation_steps", "lr_warmup_steps", "dataloader_num_workers", "adam_beta1", "adam_beta2"),
    *("adam_weight_decay", "adam_epsilon", "max_grad_norm", "local_rank", "checkpointing_steps", "noise_offset"),
    *("checkpoints_total_limit", "validation_epochs", "validation_steps", "rank", "network_alpha"),
    *("motion_sub_loss_ratio", "train_sampling_steps", "token_sample_size", "video_sample_size", "image_sample_size"),
    *("video_sample_stride", "video_sample_n_frames", "video_repeat", "tokenizer_max_length", "max_train_samples"),
    *("input_perturbation", "abnormal_norm_clip_start", "initial_grad_norm_ratio"),
}
_TEXTS = {
    *("pretrained_model_name_or_path", "revision", "variant", "train_data_dir", "train_data_meta", "output_dir"),
    *("lr_scheduler", "non_ema_revision", "hub_token", "hub_model_id", "logging_dir", "mixed_precision", "report_to"),
    *("resume_from_checkpoint", "tracker_project_name", "transformer_path", "vae_path", "train_mode", "target_name"),
    *("cache_dir", "prediction_type"),
}
_OF_LORA = {"rank", "network_alpha", "use_peft_lora", "target_name", "save_state"}
_OF_WEIGHTS = {
    *("report_model_info", "trainable_modules", "trainable_modules_low_learning_rate", "abnormal_norm_clip_start"),
    "initial_grad_norm_ratio",
}
WORDS = frozenset(_LISTS | _SWITCHES | _NUMBERS | _TEXTS)


def words_of(script: str) -> frozenset[str]:
    """The flags of one of the scripts."""
    if script == "train_lora":
        return WORDS - _OF_WEIGHTS - {"not_sigma_loss"}
    if script == "train":
        return WORDS - _OF_LORA - {"not_sigma_loss"}
    return WORDS - _OF_LORA - {"train_mode", "use_fsdp"}


def split(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The old flags, by name, each as one flag `--name=value` that keeps texts texts; and all other words."""
    found: dict[str, str] = {}
    others: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        name, given, text = word.partition("=")
        name = name.removeprefix("--").replace("-", "_")
        if not word.startswith("--") or name not in WORDS:
            others.append(word)
            continue
        values = [text] if given else []
        if name not in _SWITCHES:
            while left and not left[0].startswith("--") and (name in _LISTS or not values):
                values.append(left.pop(0))
        if name in _LISTS:
            found[name] = f"--{name}={values!r}"
        elif not values:
            found[name] = f"--{name}=True"
        elif name in _TEXTS and values[0].lower() != "none":
            found[name] = f"--{name}={values[0]!r}"
        else:
            found[name] = f"--{name}={values[0]}"
    return found, others


def split_value(flag: str) -> str:
    """The text of a flag that `split` wrote."""
    text = flag.partition("=")[2]
    return str(literal_eval(text)) if text[:1] in ("'", '"') else text
