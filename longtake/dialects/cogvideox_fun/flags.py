"""CogVideoX-Fun's flags, as argparse takes them there."""

from __future__ import annotations

from longtake.dialects.command_line import MANY

SCRIPTS = ("train_lora", "train", "train_control")
LISTS = {"validation_prompts", "validation_paths", "trainable_modules", "trainable_modules_low_learning_rate"}
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
TEXTS = {
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
ARITIES = {
    **dict.fromkeys(_SWITCHES, 0),
    **dict.fromkeys(_NUMBERS | TEXTS, 1),
    **dict.fromkeys(LISTS, MANY),
}
WORDS = frozenset(ARITIES)


def words_of(script: str) -> frozenset[str]:
    """The flags of one of the scripts."""
    if script == "train_lora":
        return WORDS - _OF_WEIGHTS - {"not_sigma_loss"}
    if script == "train":
        return WORDS - _OF_LORA - {"not_sigma_loss"}
    return WORDS - _OF_LORA - {"train_mode", "use_fsdp"}
