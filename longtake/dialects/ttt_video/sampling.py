"""The words of `sample.py`."""

from __future__ import annotations

from pathlib import Path

from longtake.dialects.tiny_weights import CHECK, NOT_THERE, is_missing
from longtake.dialects.translation import Fixed, Translation
from longtake.dialects.ttt_video.shared import Words, at_least, fix_word, put_dtype
from longtake.dialects.ttt_video.words import OF_TRAINING

_READ = ("job.exp_name", "job.seed", "model.name", "model.size", "model.video_length", "model.ssm_layer")
_READ += ("model.ttt_base_lr", "model.mini_batch_size", "model.norm_eps", "checkpoint.init_state_dir")
_OF_TRAINING = [
    name
    for section, keys in OF_TRAINING.items()
    for key in keys
    if (name := f"{section}.{key}") not in _READ and section not in ("parallelism", "remat", "wandb")
]
_OF_TRAINING.append("parallelism.fsdp_unsharded_dtype")
_NUM_IDX = Fixed((1000,), "", "the schedule has 1,000 timesteps")
_QUANTIZE = Fixed((False,), "", "timesteps are whole numbers")
_CHANNELS = Fixed((16,), "", "the autoencoder has 16")
UNREAD = {
    "eval.scale_factor": "is read nowhere there; vae_scale_factor is what latents are divided by",
    "guider.num_steps": "is read nowhere there; eval.num_denoising_steps counts",
}


def translate_sampling(work: Translation, words: Words, tiny: bool) -> None:
    """All that `sample.py` reads beside the model."""
    for name, text in UNREAD.items():
        if words.is_given(name):
            work.note(name, words.node(name), text)
    if idle := [name for name in _OF_TRAINING if words.is_given(name)]:
        work.say(f"{', '.join(idle)}: of training, and read by train.py alone")
    for name in ("sampling_num_frames", "num_denoising_steps", "image_width", "image_height", "txt_maxlen"):
        at_least(work, words, f"eval.{name}", 1)
    fix_word(work, words, "denoiser.num_idx", _NUM_IDX)
    fix_word(work, words, "denoiser.quantize_c_noise", _QUANTIZE)
    if not tiny:
        fix_word(work, words, "eval.latent_channels", _CHANNELS)
    _prompts(work, words)
    _size(work, words)
    _guidance(work, words)
    for name in ("eval.vae_checkpoint_path", "eval.t5_model_dir"):
        if tiny and words[name] and is_missing(words[name]):
            work.refuse(name, words.node(name), NOT_THERE, CHECK)
    if not tiny:
        _encoders(work, words)
    put_dtype(work, words, "eval.dtype")
    if not words["checkpoint.init_state_dir"] and not tiny:
        fix = "give the folder of a checkpoint"
        work.report_at("command line", "checkpoint.init_state_dir", None, "names the weights, and is missing", fix)
    if not words["wandb.disable"]:
        work.say("wandb: videos are files in eval.output_dir; nothing is sent to W&B")


def _prompts(work: Translation, words: Words) -> None:
    """`eval.input_file` -> `prompts`; `output_dir` and `job.exp_name` -> `save_dir`, `prompt_folders`."""
    if words["eval.input_file"]:
        work.put("prompts", words["eval.input_file"], words.node("eval.input_file"))
    folder = Path(words["eval.output_dir"]) / words["job.exp_name"]
    work.put("save_dir", str(folder), words.node("eval.output_dir"))
    work.put("prompt_folders", True, words.node("eval.output_dir"))
    work.put("seed", words["job.seed"], words.node("job.seed"))


def _size(work: Translation, words: Words) -> None:
    """`image_width`, `image_height`, `sampling_fps`, `sampling_num_frames` -> `sampling_option`, `fps_save`."""
    node = words.node("eval.sampling_num_frames")
    frames = int(words["eval.sampling_num_frames"])
    work.put("sampling_option.num_frames", 4 * (frames - 1) + 1, node)
    size = f"{int(words['eval.image_height'])}x{int(words['eval.image_width'])}"
    work.put("sampling_option.resolution", size, words.node("eval.image_height"))
    work.put("fps_save", words["eval.sampling_fps"], words.node("eval.sampling_fps"))
    steps = words.node("eval.num_denoising_steps")
    work.put("sampling_option.num_steps", int(words["eval.num_denoising_steps"]), steps)


def _guidance(work: Translation, words: Words) -> None:
    """`guider` and `discretization` -> `sampling_option`, `objective`."""
    node = words.node("guider.scale")
    work.put("sampling_option.guidance", words["guider.scale"], node)
    work.put("sampling_option.guidance_numbers", {"exp": words["guider.exp"]}, words.node("guider.exp"))
    shift = words.node("discretization.shift_scale")
    work.put("objective.solver_snr_shift", words["discretization.shift_scale"], shift)


def _encoders(work: Translation, words: Words) -> None:
    """`vae_checkpoint_path`, `vae_scale_factor`, `t5_model_dir`, `txt_maxlen` -> `ae`, `t5`."""
    if words["eval.vae_checkpoint_path"]:
        work.put("ae.from_pretrained", words["eval.vae_checkpoint_path"], words.node("eval.vae_checkpoint_path"))
    work.put("ae.scale_factor", words["eval.vae_scale_factor"], words.node("eval.vae_scale_factor"))
    if words["eval.t5_model_dir"]:
        work.put("t5.from_pretrained", words["eval.t5_model_dir"], words.node("eval.t5_model_dir"))
    work.put("t5.max_length", int(words["eval.txt_maxlen"]), words.node("eval.txt_maxlen"))
