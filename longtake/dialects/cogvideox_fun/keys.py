"""The flags of CogVideoX-Fun's three scripts, as argparse takes them there."""

from __future__ import annotations

from longtake.dialects.table import KeyRow

SCRIPTS = ("train_lora", "train", "train_control")
LORA_FILES = {
    "diffusers": "checkpoint-{step}.safetensors",
    "comfy": "checkpoint-{step}-compatible_with_comfyui.safetensors",
}
_LORA = ("train_lora",)
_WHOLE_WEIGHTS = ("train", "train_control")
_WITH_MODES = ("train_lora", "train")
_FOLDER = "weights are read from a folder: run `hf download NAME --revision ... --local-dir FOLDER`"
_NO_UPLOADS = "Longtake uploads nothing; use `hf upload` for the output folder"
_IDLE = "does nothing there"
_FROZEN = "the text encoder is frozen, as it is there"
_SIZES = "`sizes.*`, by the same names; a mode without those it needs is refused"
_SCHEDULE = "`optim.schedule`; those that end with the run need `max_train_steps`; `piecewise_constant` is refused"
_NO_FP16 = "`fp16` is refused: its gradients overflow without a loss scale"
_WEIGHTS = "`model.from_pretrained`, `ae.from_pretrained`, at the sizes of the folder"
_TARGETS = (
    "`lora.targets`: names of the published model (`ff.net`, `linear_1`), of layers or of modules that hold layers. "
    "`ff.0` and `ff.2` are the MLPs; a name that matches nothing is refused"
)
_LAUNCHER = "set by the launcher; refused where it has another value"
_VALIDATION = (
    "`validation.references`; of control models they are control videos, and needed. The negative prompt is that "
    "program's own, or `--validation.negative_prompt`"
)

FOLDERS = (
    KeyRow(
        "pretrained_model_name_or_path",
        takes="text",
        docs="`model.from_pretrained`: the folder has autoencoder, text encoder and schedule too",
    ),
    KeyRow("transformer_path", takes="text", docs=_WEIGHTS),
    KeyRow("vae_path", takes="text", docs=_WEIGHTS),
    KeyRow("revision", takes="text", only=(None,), reason=_FOLDER),
    KeyRow("variant", takes="text", only=(None,), reason=_FOLDER),
    KeyRow("non_ema_revision", takes="text", only=(None,), reason=_FOLDER),
    KeyRow("cache_dir", takes="text", only=(None,), reason=_FOLDER),
    KeyRow("hub_token", takes="text", only=(None, ""), reason=_NO_UPLOADS),
    KeyRow("hub_model_id", takes="text", only=(None, ""), reason=_NO_UPLOADS),
    KeyRow("push_to_hub", takes="nothing", only=(False, None), reason=_NO_UPLOADS),
    KeyRow("output_dir", takes="text", default="sd-model-finetuned", docs='`outputs`; `exp_name = "run"`'),
    KeyRow("resume_from_checkpoint", takes="text", docs="`resume` for `latest`, `load` for an earlier checkpoint"),
    KeyRow("train_data_meta", takes="text", docs="`dataset.data_path`"),
    KeyRow("train_data_dir", takes="text", default=".", docs="`dataset.root`"),
    KeyRow("logging_dir", takes="text", docs="refused unless `logs`: curves are in the run's folder"),
)
LAUNCHER = (
    KeyRow("mixed_precision", takes="text", docs=f"`dtype`: `bf16`, or `no` for `fp32`; {_NO_FP16}"),
    KeyRow("local_rank", docs=_LAUNCHER),
    KeyRow("use_deepspeed", takes="nothing", docs=_LAUNCHER),
    KeyRow("use_fsdp", takes="nothing", scripts=_WITH_MODES, docs=_LAUNCHER),
)
RATES = (
    KeyRow("learning_rate", default=1e-4, docs="`lr`"),
    KeyRow("scale_lr", takes="nothing", docs="multiplies `lr` by accumulation, batch size and processes"),
    KeyRow("lr_scheduler", takes="text", default="constant", docs=_SCHEDULE),
    KeyRow("lr_warmup_steps", default=500, docs=_SCHEDULE),
)
SIZES = (
    KeyRow("enable_bucket", takes="nothing", ours="sizes.enable_bucket", docs=_SIZES),
    KeyRow("video_sample_size", default=512, ours="sizes.video_sample_size", docs=_SIZES),
    KeyRow("image_sample_size", default=512, ours="sizes.image_sample_size", docs=_SIZES),
    KeyRow("token_sample_size", default=512, ours="sizes.token_sample_size", docs=_SIZES),
    KeyRow("video_sample_n_frames", default=17, ours="sizes.video_sample_n_frames", docs=_SIZES),
    KeyRow("video_sample_stride", default=4, ours="sizes.video_sample_stride", docs=_SIZES),
    KeyRow("random_hw_adapt", takes="nothing", ours="sizes.random_hw_adapt", docs=_SIZES),
    KeyRow(
        "training_with_video_token_length",
        takes="nothing",
        ours="sizes.training_with_video_token_length",
        docs=_SIZES,
    ),
    KeyRow("random_frame_crop", takes="nothing", ours="sizes.random_frame_crop", docs=_SIZES),
    KeyRow("random_ratio_crop", takes="nothing", ours="sizes.random_ratio_crop", docs=_SIZES),
    KeyRow(
        "keep_all_node_same_token_length",
        takes="nothing",
        ours="sizes.keep_all_node_same_token_length",
        docs=_SIZES,
    ),
    KeyRow("auto_tile_batch_size", takes="nothing", ours="sizes.auto_tile_batch_size", docs=_SIZES),
    KeyRow("train_batch_size", default=16, ours="sizes.batch_size"),
)
TRAINING = (
    KeyRow("video_repeat", default=0, ours="dataset.video_repeat"),
    KeyRow(
        "train_mode",
        takes="text",
        default="normal",
        scripts=_WITH_MODES,
        docs="`condition_config`: `normal` is text alone, `inpaint` and `i2v` are CogVideoX-Fun's masks",
    ),
    KeyRow("seed", ours="seed", docs="the same"),
    KeyRow("num_train_epochs", default=100, ours="epochs", ignored=(None,), docs="`epochs`; without `max_train_steps`"),
    KeyRow("max_train_steps", ours="max_steps", ignored=(None,)),
    KeyRow("gradient_accumulation_steps", default=1, ours="accumulation_steps", ignored=(None,)),
    KeyRow("dataloader_num_workers", default=0, ours="num_workers", ignored=(None,)),
    KeyRow("adam_weight_decay", default=1e-2, ours="optim.weight_decay", ignored=(None,)),
    KeyRow("adam_epsilon", default=1e-8, ours="eps", ignored=(None,)),
    KeyRow("adam_beta1", default=0.9, docs="`optim.betas`"),
    KeyRow("adam_beta2", default=0.999, docs="`optim.betas`"),
    KeyRow(
        "max_grad_norm",
        default=1.0,
        ours="grad_clip",
        ignored=(None,),
        docs="`grad_clip`, of the norm over all ranks; 0 is no clipping, where there it makes every gradient 0",
    ),
    KeyRow("abnormal_norm_clip_start", default=1000, scripts=_WHOLE_WEIGHTS, docs="`optim.clip`"),
    KeyRow("initial_grad_norm_ratio", default=5, scripts=_WHOLE_WEIGHTS, docs="`optim.clip`"),
    KeyRow("checkpointing_steps", default=500, ours="ckpt_every", ignored=(None,)),
    KeyRow(
        "checkpoints_total_limit",
        ours="keep_n_latest",
        ignored=(None,),
        docs="`keep_n_latest`; files of adapters are removed with their checkpoints",
    ),
    KeyRow("train_sampling_steps", default=1000, ours="objective.num_timesteps", ignored=(None,)),
    KeyRow("uniform_sampling", takes="nothing", ours="objective.uniform_sampling", ignored=(None,)),
    KeyRow("allow_tf32", takes="nothing", ours="tf32", ignored=(None,)),
    KeyRow("use_ema", takes="nothing", ours="ema_decay", on=0.9999),
    KeyRow("use_8bit_adam", takes="nothing", ours="optim.states", on="8bit"),
    KeyRow(
        "snr_loss",
        takes="nothing",
        ours="objective.min_snr_gamma",
        on=5.0,
        note="objective.min_snr_gamma = 5",
        docs="`objective.min_snr_gamma = 5`; without effect there",
    ),
    KeyRow(
        "gradient_checkpointing",
        takes="nothing",
        docs='`model.grad_ckpt_settings`: all blocks, with `model.recompute = "full"`',
    ),
    KeyRow("motion_sub_loss", takes="nothing", docs="`objective.motion_loss`"),
    KeyRow("motion_sub_loss_ratio", default=0.25, docs="`objective.motion_loss`"),
    KeyRow("vae_mini_batch", default=32, docs="`ae.mini_batch`"),
    KeyRow("tokenizer_max_length", default=226, docs="`t5.max_length`"),
    KeyRow("low_vram", takes="nothing", docs='`placement = "offloaded"` of `t5` and `ae`'),
    KeyRow("enable_text_encoder_in_dataloader", takes="nothing", docs='`placement = "offloaded"` of `t5`'),
    KeyRow("report_to", takes="text", default="tensorboard", docs="`tensorboard`, `wandb`"),
    KeyRow("tracker_project_name", takes="text", docs="`wandb_project`"),
    KeyRow("validation_prompts", takes="list", docs="`validation.prompts`"),
    KeyRow("validation_paths", takes="list", docs=_VALIDATION),
    KeyRow("validation_steps", default=2000, docs="`validate_every`"),
    KeyRow("validation_epochs", default=5, docs="`validate_every_passes`"),
    KeyRow(
        "report_model_info",
        takes="nothing",
        scripts=_WHOLE_WEIGHTS,
        note="the numbers of parameters are always printed",
    ),
    KeyRow("use_came", takes="nothing", only=(False,), reason="AdamW is the optimizer; --use_8bit_adam saves memory"),
    KeyRow(
        "multi_stream",
        takes="nothing",
        only=(False,),
        reason="encoding has no stream of its own; a latent store saves it whole (docs/data.md)",
    ),
    KeyRow("train_text_encoder", takes="nothing", only=(False,), reason=_FROZEN),
    KeyRow(
        "random_flip",
        takes="nothing",
        only=(False,),
        reason=f"{_IDLE}, and captions would name the wrong side",
    ),
    KeyRow("not_sigma_loss", takes="nothing", only=(False,), scripts=("train_control",), reason=_IDLE),
    KeyRow(
        "noise_offset",
        only=(0, 0.0, None),
        reason=f"{_IDLE}: the last timestep is pure noise already",
    ),
    KeyRow("input_perturbation", only=(0, 0.0, None), reason=_IDLE),
    KeyRow("max_train_samples", only=(None,), reason=f"{_IDLE}; cut the table: `longtake data split`"),
    KeyRow(
        "prediction_type",
        takes="text",
        only=("v_prediction", None),
        reason="the schedule ends in pure noise, from which only v can be learnt",
    ),
)
ADAPTERS = (
    KeyRow("rank", default=128, scripts=_LORA, docs="`lora.rank`"),
    KeyRow("network_alpha", default=64, scripts=_LORA, docs="`lora.alpha`; 0 is the rank"),
    KeyRow("target_name", takes="text", scripts=_LORA, docs=_TARGETS),
    KeyRow(
        "use_peft_lora",
        takes="nothing",
        scripts=_LORA,
        docs="names in `target_name` are whole ends of names; without it any layer that has them in its name",
    ),
    KeyRow(
        "save_state",
        takes="nothing",
        scripts=_LORA,
        note="the run's folder has the whole state of each checkpoint, and the files of adapters are next to it",
    ),
)
WEIGHTS = (
    KeyRow("trainable_modules", takes="list", scripts=_WHOLE_WEIGHTS, docs="`train_only`; `.` is all"),
    KeyRow(
        "trainable_modules_low_learning_rate",
        takes="list",
        scripts=_WHOLE_WEIGHTS,
        docs="`train_only`, `optim.groups` at half the rate",
    ),
)
ROWS = (*FOLDERS, *LAUNCHER, *RATES, *SIZES, *TRAINING, *ADAPTERS, *WEIGHTS)
