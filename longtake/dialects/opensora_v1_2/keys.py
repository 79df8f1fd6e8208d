"""The flags of Open-Sora 1.2's scripts, and the keys of its run files."""

from __future__ import annotations

from typing import Any

from longtake.contracts import UserError
from longtake.dialects.table import KeyRow

LENGTHS = {
    "1x": 51,
    "2x": 102,
    "4x": 204,
    "8x": 408,
    "16x": 816,
    "2s": 51,
    "4s": 102,
    "8s": 204,
    "16s": 408,
    "32s": 816,
}
SCRIPTS = {"train": "scripts/train.py", "generate": "scripts/inference.py", "plan": "scripts/misc/search_bs.py"}
_KERNELS = "attention and norms take their fastest path by themselves"
_TABLE = "bucket_config sets the batch size and resolution of each bucket"
_TIMES = "the log has times of steps and of the loader in every line"
_EITHER_FORM = "folders and files of either form are read"
_FROZEN = "the autoencoder does not train"
_STORE = "make a latent store with `longtake data encode RUN -o FOLDER` and give it as dataset.latents"
_STORE_SIZES = "a latent store has its sizes in it"
_UNPAID = "Longtake sends nothing to paid services; write the final prompt"
_CYCLE = (
    "`optim.schedule`, with `warmup_steps`; without them `1cycle` does nothing, as there. `linear` goes straight from "
    "point to point, where there it runs backwards"
)
_RATE = (
    "the same; in the presets of stages 4 to 7 the last rate and the rise of `optim.schedule`, which reads no `lr` "
    "(`config show` leaves it out)"
)
_BOTH = (
    "one for each prompt, of files, not addresses; written after it as the JSON that prompts can end in "
    "([opensora_v1_2.md](opensora_v1_2.md#videos))"
)
_FPS = "`fps_save`, one rate for both, 24 where one is left out; two that differ are refused"
_SIZE = "`sampling_option.resolution`; `--image-size 240 426` is `240x426`"
_CLIPS = "`num_clips`, `carries`"
_FOLDER = (
    "`SAVE_DIR/video_240p/NAME_prompt_0000.mp4`; a video that exists gets a neighbour, where that program skips it "
    "under `prompt_as_path`"
)
_OURS = "the same"

_WHOLE = 10**6  # frames at once: more than a clip has, so that it is encoded whole


def frames_of(length: Any) -> Any:
    """Frames of a clip: a number, or `4s`, `2x`. Raises `UserError` for another text."""
    if isinstance(length, int):
        return length
    text = str(length)
    if text not in LENGTHS and not text.isdecimal():
        raise UserError(f"num_frames = {length!r}: write a number, or one of {', '.join(LENGTHS)}")
    return LENGTHS.get(text) or int(text)


def fact_text(fact: Any) -> str:
    """Return a fact about a clip as captions have it; empty for None."""
    return "" if str(fact) == "None" else str(fact)


def _count_or_whole(count: Any) -> Any:
    return _WHOLE if count is None else count


# Flags of all three scripts, and what they mean in training.
FLAGS = (
    KeyRow("data-path", takes="text", ours="dataset.data_path"),
    KeyRow("seed", ours="seed", docs=_OURS),
    KeyRow("outputs", takes="text", ours="outputs", docs=_OURS),
    KeyRow("dtype", takes="text", ours="dtype", docs="the same: `bf16`; `fp16` is refused"),
    KeyRow(
        "ckpt-path",
        docs="`model.from_pretrained`. A `.pth` or `.pt`, PixArt-Sigma's or an `ema.pt`, is read by a reader of "
        "tensors alone, with `model.strict_load = False`; of a checkpoint the weights as trained, as there. Without "
        "it a preset has the weights that it names, and a file none",
    ),
    KeyRow("flash-attn", note=_KERNELS),
    KeyRow("layernorm-kernel", note=_KERNELS),
    KeyRow("batch-size", note=_TABLE),
    KeyRow("resolution", takes="text", note=_TABLE),
)
TRAINING_FLAGS = (
    KeyRow("lr", ours="lr", docs=_RATE),
    KeyRow("warmup-steps", ours="warmup_steps", docs=_RATE),
    KeyRow(
        "load",
        docs="`load`: weights, EMA weights, optimizer, rate and position in the data, also after the table or the "
        "number of processes has changed. Steps stay as large as they were, unless `slots_per_step` is given. A "
        "checkpoint of Open-Sora, `epochE-global_stepS` with `model`, `ema.pt` and `optimizer`, is read "
        "too ([opensora_v1_2.md](opensora_v1_2.md#checkpoints-of-open-sora))",
    ),
    KeyRow(
        "start-from-scratch",
        takes="nothing",
        docs="`start_epoch = 0`, `start_step = 0`, with `load`; alone nothing, as there",
    ),
    KeyRow(
        "wandb",
        docs="`wandb`; `False` is False, where there any text is True; `True` without a login is an error",
    ),
    KeyRow("record-time", takes="nothing", note=_TIMES),
)
# Of run files of both kinds.
PARTS = (
    KeyRow("model.type", docs="`STDiT3-XL/2` and `STDiT3-3B/2` are sizes of `stdit3`"),
    KeyRow("model.enable_flash_attn", note=_KERNELS),
    KeyRow("model.enable_layernorm_kernel", note=_KERNELS),
    KeyRow("model.enable_sequence_parallelism", note="parallel.sequence sets it"),
    KeyRow("model.input_size", note="any size fits"),
    KeyRow("model.force_huggingface", note=_EITHER_FORM),
    KeyRow(
        "model.skip_y_embedder",
        only=(False, None),
        reason="it was for stored features; `longtake data encode` stores texts as T5 gives them, and the model "
        "projects them",
    ),
    KeyRow("model.drop_path", only=(0, 0.0, None), reason="no block is skipped"),
    KeyRow("vae.type", only=("OpenSoraVAE_V1_2",), reason="other autoencoders are not read for this model"),
    KeyRow("vae.from_pretrained", ours="ae.from_pretrained", ignored=(None,)),
    KeyRow(
        "vae.micro_frame_size",
        ours="ae.micro_frame_size",
        convert=_count_or_whole,
        docs="`ae.micro_frame_size`; None: the whole clip",
    ),
    KeyRow(
        "vae.micro_batch_size",
        ours="ae.micro_batch_size",
        convert=_count_or_whole,
        docs="`ae.micro_batch_size`; None: the whole batch",
    ),
    KeyRow("vae.force_huggingface", note=_EITHER_FORM),
    KeyRow("vae.freeze_vae_2d", note=_FROZEN),
    KeyRow("vae.cal_loss", note=_FROZEN),
    KeyRow("text_encoder.type", only=("t5",), reason="captions are read by T5"),
    KeyRow("text_encoder.from_pretrained", ours="t5.from_pretrained", ignored=(None,)),
    KeyRow("text_encoder.model_max_length", ours="t5.max_length", ignored=(None,)),
    KeyRow("text_encoder.shardformer", ours="t5.shardformer", ignored=(None,)),
    KeyRow("scheduler.type", only=("rflow",), reason="it learns velocities of rectified flow"),
    KeyRow("scheduler.num_timesteps", only=(1000, None), reason="times go from 0 to 1000"),
    KeyRow(
        "scheduler.use_timestep_transform",
        ours="objective.use_timestep_transform",
        ignored=(None,),
        docs="`objective.use_timestep_transform`; False where it is left out, and a line says so",
    ),
    KeyRow(
        "scheduler.sample_method",
        ours="objective.sample_method",
        ignored=(None,),
        docs="`objective.sample_method`; `uniform` where it is left out, and a line says so",
    ),
    KeyRow("scheduler.use_discrete_timesteps", ours="objective.use_discrete_timesteps", ignored=(None,)),
    KeyRow("scheduler.loc", ours="objective.timestep_mean", ignored=(None,)),
    KeyRow("scheduler.scale", ours="objective.timestep_std", ignored=(None,)),
    KeyRow("scheduler.transform_scale", ours="objective.transform_scale", ignored=(None,)),
    KeyRow("scheduler.num_sampling_steps", ours="sampling_option.num_steps", ignored=(None,)),
    KeyRow("scheduler.cfg_scale", ours="sampling_option.guidance", ignored=(None,)),
    KeyRow("num_bucket_build_workers", note="the order of an epoch is arithmetic on columns; no workers are needed"),
)
TRAINING = (
    KeyRow("weight_decay", ours="optim.weight_decay", ignored=(None,)),
    KeyRow("adam_eps", ours="eps", ignored=(None,)),
    KeyRow("lr_schedule", docs=_CYCLE),
    KeyRow("anneal_strategy", docs=_CYCLE),
    KeyRow("cooldown_steps", docs=_CYCLE),
    KeyRow("min_lr", docs=_CYCLE),
    KeyRow("max_lr", docs=_CYCLE),
    KeyRow(
        "mask_ratios",
        docs="`condition_config`, with the rest as `identity`; `intepolate` is `interpolate`; all 0: no masks",
    ),
    KeyRow("grad_checkpoint", docs='`model.grad_ckpt_settings`: all blocks, with `model.recompute = "full"`'),
    KeyRow("plugin", docs="`zero2`: `parallel.zero = 2`; `zero2-seq`: `parallel.sequence` too; others are refused"),
    KeyRow("sp_size", docs="`parallel.sequence`, with `zero2-seq`"),
    KeyRow("start_from_scratch", docs="`start_epoch = 0`, `start_step = 0`, with `load`; alone nothing, as there"),
    KeyRow(
        "model.freeze_y_embedder", ours="freeze", values={True: ("y_embedder",), False: (), None: ()}, docs="`freeze`"
    ),
    KeyRow("model.only_train_temporal", ours="train_only", on=("temporal_blocks.*",), docs="`train_only`"),
    KeyRow("model.class_dropout_prob", ours="dropout_ratio.t5", docs="`dropout_ratio.t5`; 0.1 where it is left out"),
    KeyRow("dataset.type", only=("VariableVideoTextDataset", None), reason=f"clips come from a table; {_STORE}"),
    KeyRow("dataset.frame_interval", only=(1, None), reason="frames follow each other; others failed there too"),
    KeyRow("dataset.image_size", only=(None,), reason="bucket_config sets the sizes"),
    KeyRow("dataset.num_frames", only=(None,), reason="bucket_config sets the lengths"),
    KeyRow("load_video_features", only=(False, None), reason=_STORE),
    KeyRow("load_text_features", only=(False, None), reason=_STORE),
    KeyRow("text_encoder_output_dim", note=_STORE_SIZES),
    KeyRow("text_encoder_model_max_length", note=_STORE_SIZES),
    KeyRow("vae_out_channels", note=_STORE_SIZES),
    KeyRow("reduce_bucket_size_in_m", note="gradients are reduced block by block, during the backward pass"),
    KeyRow("batch_size", note=_TABLE),
    KeyRow("resolution", note=_TABLE),
    KeyRow("flash_attn", note=_KERNELS),
    KeyRow("layernorm_kernel", note=_KERNELS),
    KeyRow("record_time", note=_TIMES),
    # Longtake's own keys
    KeyRow("prefetch_factor", ours="prefetch_factor", ignored=(None,)),
    KeyRow("num_workers", ours="num_workers", ignored=(None,)),
    KeyRow("wandb", ours="wandb", ignored=(None,)),
    KeyRow("seed", ours="seed", ignored=(None,)),
    KeyRow("load", ours="load", ignored=(None,)),
    KeyRow("epochs", docs=_OURS),
    KeyRow("ckpt_every", docs=_OURS),
    KeyRow("bucket_config", docs=_OURS),
    KeyRow("lr", docs="the same; 1e-4 where it is left out, and a line says so"),
    KeyRow("grad_clip", docs="the same; no clipping where it is left out, and a line says so"),
    KeyRow("ema_decay", docs="the same; 0.9999 where it is left out, and a line says so"),
    KeyRow("log_every", docs="the same; 1 where it is left out, and a line says so"),
)
# Keys of files, and flags.
INFERENCE_FLAGS = (
    KeyRow("resolution", takes="text", ours="sampling_option.resolution", ignored=(None,)),
    KeyRow("image_size", takes="two", docs=_SIZE),
    KeyRow("aspect_ratio", takes="text", ours="sampling_option.aspect_ratio", ignored=(None,)),
    KeyRow(
        "num_frames",
        ours="sampling_option.num_frames",
        ignored=(None,),
        convert=frames_of,
        docs="`sampling_option.num_frames`, which takes `4s` and `2x` too",
    ),
    KeyRow("num_sampling_steps", ours="sampling_option.num_steps"),
    KeyRow("cfg_scale", ours="sampling_option.guidance"),
    KeyRow("fps", ours="fps_save", ignored=(None,), docs=_FPS),
    KeyRow("save_fps", docs=_FPS),
    KeyRow("frame_interval", only=(1, None), reason="frames follow each other"),
    KeyRow("save_dir", takes="text", ours="save_dir", ignored=(None,), docs=f"the same: {_FOLDER}"),
    KeyRow("sample_name", takes="text", docs="`save_prefix`"),
    KeyRow("prompt_as_path", takes="nothing", docs=_OURS),
    KeyRow("prompt", takes="list", docs=_OURS),
    KeyRow("start_index", docs=_OURS),
    KeyRow("end_index", docs=_OURS),
    KeyRow("num_sample", docs="the same; each video from a seed of its own, where there all have one noise"),
    KeyRow("prompt_path", takes="text", docs="`prompts`"),
    KeyRow("reference_path", takes="list", docs=_BOTH),
    KeyRow("mask_strategy", takes="list", docs=_BOTH),
    KeyRow("loop", docs=_CLIPS),
    KeyRow("condition_frame_length", docs=_CLIPS),
    KeyRow("aes", takes="text", ours="caption_facts.aes", convert=fact_text),
    KeyRow("flow", takes="text", ours="caption_facts.flow", convert=fact_text),
    KeyRow("camera_motion", takes="text", ours="caption_facts.camera_motion", convert=fact_text),
    KeyRow("llm_refine", takes="truth", only=(False, None), reason=_UNPAID),
    KeyRow("prompt_generator", takes="text", only=(None,), reason=_UNPAID),
    KeyRow("watermark", takes="truth", only=(False, None), reason="videos have no mark"),
    KeyRow("verbose", note="each video is printed in any case"),
)
INFERENCE = (
    *INFERENCE_FLAGS,
    KeyRow("condition_frame_edit", docs=_CLIPS),
    KeyRow("multi_resolution", only=("STDiT2", None), reason="the model gets sizes in the one way of STDiT3"),
    KeyRow("align", note="the positions of a mask strategy are taken as written, not moved to multiples of it"),
    KeyRow("batch_size", docs=_OURS),
    KeyRow("force_huggingface", note=_EITHER_FORM),
    KeyRow("outputs", note="--save-dir is the folder of videos"),
    KeyRow("data_path", note="--prompt-path is the file of prompts"),
    KeyRow("flash_attn", note=_KERNELS),
    KeyRow("layernorm_kernel", note=_KERNELS),
    KeyRow("seed", ours="seed", ignored=(None,)),
)
SEARCH = (
    KeyRow(
        "base_step_time",
        docs="`--target-step-seconds`; 12 in `misc/bs.py`, whose table is that of `opensora_v1_2/stage2`",
    ),
    KeyRow("base", docs="does nothing with `base_step_time`, as there; alone it is refused"),
    KeyRow("resolution", docs="the one resolution of the table that is searched"),
)


def flags_of(verb: str) -> dict[str, KeyRow]:
    """Flag of a script -> its row."""
    more = {"train": TRAINING_FLAGS, "generate": INFERENCE_FLAGS, "plan": ()}
    return {row.key.replace("_", "-"): row for row in (*FLAGS, *more[verb])}
