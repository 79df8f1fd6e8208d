"""The keys of TTT-Video's TOML files and flags, each with its default there."""

from __future__ import annotations

from collections.abc import Sequence
from operator import not_

from longtake.dialects.command_line import as_flag, split
from longtake.dialects.table import KeyRow, refuse_bare

LENGTHS = ("3sec", "9sec", "18sec", "30sec", "63sec")
MIXERS = ("ttt_mlp", "ttt_linear", "none", "large_chunk")
CONFIG_FILE = "job.config_file"
_DTYPES = {"bfloat16": "bf16", "float32": "fp32"}
_NO_SCALE = "bf16 needs no loss scale"
_BLOCKS = "model.grad_ckpt_settings: all blocks are recomputed, once"
_SAVED = "not needed. Each block is recomputed once; the outputs of attention and of both scans are saved"
_SLOTS = "`slots_per_step`: the number of samples per step, one at a time on each rank"
_SCHEDULE = "`optim.schedule`, and that of TTT's groups"
_SIZE = "`sampling_option.resolution`, `HEIGHTxWIDTH`"
_PRESET = "the preset of the stage; `debug` is the small model"
_VIDEOS = "`save_dir`: videos are `OUTPUT_DIR/EXP_NAME/prompt-0/000000.mp4` with `prompt.txt` (`prompt_folders`)"

MODEL = (
    KeyRow("model.name", default="cogvideo", only=("cogvideo",), reason="it is the only model"),
    KeyRow("model.size", default="5B", docs=_PRESET),
    KeyRow("model.video_length", default="3sec", docs=_PRESET),
    KeyRow("model.norm_eps", default=1e-6, note="not needed: read nowhere there, norms have 1e-6"),
    KeyRow(
        "model.ssm_layer",
        default="ttt_mlp",
        ours="model.mixer",
        values={mixer: mixer for mixer in MIXERS},
        docs="`model.mixer`",
    ),
    KeyRow("model.ttt_base_lr", default=0.1, ours="model.ttt_base_lr", docs="the same"),
    KeyRow("model.mini_batch_size", default=64, ours="model.mini_batch_size", docs="the same"),
    KeyRow(
        "parallelism.tp_sharding", default=1, ours="parallel.tensor", docs="`parallel.tensor`; all weights train too"
    ),
    KeyRow("parallelism.dp_sharding", default=8, ours="parallel.shard"),
    KeyRow("parallelism.dp_replicate", default=1, ours="parallel.replicate"),
    KeyRow("remat.transformer_checkpoint_layer_group_size", default=1, note=_BLOCKS),
    KeyRow(
        "remat.scan_checkpoint_group_size",
        default=16,
        note="the scan saves its state as often as the square root of its steps",
    ),
    KeyRow("remat.forward_ssm", default=False, ignored=(False,), note=_SAVED),
    KeyRow("remat.reverse_ssm", default=False, ignored=(False,), note=_SAVED),
    KeyRow("remat.attention", default=False, ignored=(False,), note=_SAVED),
    KeyRow("remat.mlp", default=False, ignored=(False,), note=_SAVED),
    KeyRow("remat.seq_modeling_block", default=False, ignored=(False,), note=_SAVED),
    KeyRow(
        "remat.shard_transformer_inputs",
        default=False,
        ignored=(False,),
        note="the inputs of recomputed blocks are sharded over tensor-parallel ranks in any case",
    ),
    KeyRow(
        "checkpoint.init_state_dir",
        default=None,
        docs="`model.from_pretrained`: the result of the conversion, a run of ours, or a checkpoint of that program. "
        "Without it training starts from scratch, and a line says so",
    ),
    KeyRow("job.exp_name", default="default job", docs="`exp_name`"),
    KeyRow(
        "job.seed", default=42, ours="seed", docs="`seed`; it also sets the order of the clips, there always seed 0"
    ),
)
WANDB = (
    KeyRow(
        "wandb.disable", default=False, ours="wandb", convert=not_, docs="`wandb`, reversed; generation sends nothing"
    ),
    KeyRow("wandb.project", default="ttt-video", ours="wandb_project", ignored=("",)),
    KeyRow("wandb.entity", default="default", ours="wandb_entity", ignored=("default",)),
    KeyRow("wandb.log_interval", default=50, ignored=(1,), note="every step is logged, as it is there"),
    KeyRow(
        "wandb.alert",
        default=False,
        ignored=(False,),
        note="W&B itself alerts of runs that fail; see its settings",
    ),
)
TRAINING = (
    KeyRow("job.dump_folder", default=None, docs="`outputs`; checkpoints are `EXP_NAME/epoch*-global_step*` in it"),
    KeyRow(
        "model.scale_factor",
        default=1.0,
        docs="`ae.scale_factor`; converted weights have 0.7, which counts where no flag sets another",
    ),
    KeyRow(
        "training.adapter_method",
        default=None,
        docs="`sft`: all weights train; `qkvo`: `train_only`. TTT-Linear's published file of 3 seconds has `qkvo`, "
        "where its page names all weights; a line says so",
    ),
    KeyRow("training.dataset_path", default=None, ours="dataset.root"),
    KeyRow(
        "training.jsonl_paths",
        default=None,
        docs="`dataset.data_path` and `dataset.latents`; of several lists `dataset.mix`",
    ),
    KeyRow(
        "training.empty_prompt",
        default=None,
        ours="dataset.empty_prompt",
        docs="`dataset.empty_prompt`, the embedding of the empty prompt, which replaces a tenth of the texts. It is "
        "Longtake's: without it no text is dropped, as there (`dropout_ratio.t5 = 0`), and a line says so. "
        "`--t5.from_pretrained FOLDER` computes it instead",
    ),
    KeyRow("training.global_batch_size", default=8, ours="slots_per_step", least=1, docs=_SLOTS),
    KeyRow(
        "training.grad_accum_steps",
        default=1,
        least=1,
        ignored=(1,),
        note="every rank takes one sample at a time, global_batch_size of them together make a step",
        docs=_SLOTS,
    ),
    KeyRow("training.warmup_steps", default=50, least=0, docs="`optim.schedule`"),
    KeyRow("training.steps", default=5000, ours="max_steps", least=1),
    KeyRow("training.gc_freq", default=50, ours="gc_every", least=0),
    KeyRow("optimizer.name", default="AdamW", only=("AdamW",), reason="AdamW is the optimizer"),
    KeyRow("optimizer.lr", default=1e-4, docs=_SCHEDULE),
    KeyRow("optimizer.lr_end", default=0.0, docs=_SCHEDULE),
    KeyRow("optimizer.lr_ssm", default=1e-4, docs=_SCHEDULE),
    KeyRow("optimizer.lr_schedule", default="linear", docs=_SCHEDULE),
    KeyRow("optimizer.lr_ssm_schedule", default="linear", docs=_SCHEDULE),
    KeyRow("optimizer.gradient_clipping_norm", default=0.1, ours="grad_clip"),
    KeyRow("checkpoint.interval", default=0, ours="ckpt_every"),
    KeyRow("checkpoint.resume", default=False, docs="`resume`"),
    KeyRow("checkpoint.resume_step", default=-1, docs="`resume` for the last step, `load` for another"),
    KeyRow(
        "checkpoint.timeout_minutes",
        default=0,
        ours="time_limit",
        ignored=(0,),
        docs="`time_limit`: the launch ends with a checkpoint before it, where there it saves and runs until killed",
    ),
    KeyRow(
        "parallelism.fsdp_unsharded_dtype",
        default="bfloat16",
        ours="dtype",
        values=_DTYPES,
        reason=_NO_SCALE,
    ),
    KeyRow("comm.init_timeout_seconds", default=1200, ours="watchdog_seconds"),
)
SAMPLING = (
    KeyRow("eval.input_file", default=None, ours="prompts"),
    KeyRow("eval.output_dir", default="./output", docs=_VIDEOS),
    KeyRow("eval.image_width", default=720, least=1, docs=_SIZE),
    KeyRow("eval.image_height", default=480, least=1, docs=_SIZE),
    KeyRow("eval.sampling_fps", default=16, ours="fps_save"),
    KeyRow(
        "eval.sampling_num_frames",
        default=13,
        least=1,
        ours="sampling_option.num_frames",
        convert=lambda latents: 4 * (latents - 1) + 1,
        docs="`sampling_option.num_frames`: frames of the video, 4 for each latent frame and the first",
    ),
    KeyRow("eval.num_denoising_steps", default=50, least=1, ours="sampling_option.num_steps"),
    KeyRow("eval.scale_factor", default=0.7, note="not needed: read nowhere there; vae_scale_factor divides latents"),
    KeyRow("eval.dtype", default="bfloat16", ours="dtype", values=_DTYPES, reason=_NO_SCALE),
    KeyRow("guider.scale", default=6, ours="sampling_option.guidance"),
    KeyRow(
        "guider.exp",
        default=5,
        ours="sampling_option.guidance_numbers.exp",
        docs="`sampling_option.guidance_numbers.exp`; `sampling_option.guidance_rule` is `dynamic`, as published, "
        "which swings; `dynamic_by_step` rises from step to step",
    ),
    KeyRow("guider.num_steps", default=50, note="not needed: read nowhere there; eval.num_denoising_steps counts"),
    KeyRow("denoiser.num_idx", default=1000, only=(1000,), reason="the schedule has 1,000 timesteps"),
    KeyRow("denoiser.quantize_c_noise", default=False, only=(False,), reason="timesteps are whole numbers"),
    KeyRow("discretization.shift_scale", default=1.0, ours="objective.solver_snr_shift"),
)
# Not read with --tiny, whose encoders are its own.
ENCODERS = (
    KeyRow("eval.latent_channels", default=16, only=(16,), reason="the autoencoder has 16"),
    KeyRow("eval.vae_checkpoint_path", default=None, ours="ae.from_pretrained"),
    KeyRow("eval.vae_scale_factor", default=1.0, ours="ae.scale_factor"),
    KeyRow("eval.t5_model_dir", default=None, ours="t5.from_pretrained"),
    KeyRow("eval.txt_maxlen", default=498, least=1, ours="t5.max_length"),
)


def rows_of(verb: str) -> tuple[KeyRow, ...]:
    """Return the keys of `train.py`, or of `sample.py`."""
    training = (*MODEL, *WANDB, *TRAINING)
    return training if verb == "train" else (*training, *SAMPLING, *ENCODERS)


def read_flags(arguments: Sequence[str], verb: str) -> tuple[str | None, dict[str, str], list[str]]:
    """Return the run file that `--job.config_file` names; one flag for each key that is given; all other arguments."""
    rows = {row.key: row for row in rows_of(verb)}
    arities = {key: int(not isinstance(row.default, bool)) for key, row in rows.items()}
    given, groups = split(arguments, {**arities, CONFIG_FILE: 1}, _with_underscores)
    refuse_bare(given, rows | {CONFIG_FILE: KeyRow(CONFIG_FILE)})
    run = "".join(given.pop(CONFIG_FILE)) if CONFIG_FILE in given else None
    flags = {}
    for key, values in given.items():
        is_text = rows[key].default is None or isinstance(rows[key].default, str)
        is_list = "".join(values).startswith(("[", "("))
        flags[key] = as_flag(key, values, is_text and not is_list)
    return run, flags, [argument for group in groups for argument in group]


def _with_underscores(name: str) -> str:
    section, _, key = name.partition(".")
    return f"{section}.{key.replace('-', '_')}"
