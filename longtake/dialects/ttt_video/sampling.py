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
_LEAST = {
    f"eval.{name}": 1
    for name in ("sampling_num_frames", "num_denoising_steps", "image_width", "image_height", "txt_maxlen")
}
MOVED = {
    "job.seed": "seed",
    "eval.input_file": "prompts",
    "eval.sampling_fps": "fps_save",
    "eval.num_denoising_steps": "sampling_option.num_steps",
    "guider.scale": "sampling_option.guidance",
    "guider.exp": "sampling_option.guidance_numbers.exp",
    "discretization.shift_scale": "objective.solver_snr_shift",
}
OF_ENCODERS = {
    "eval.vae_checkpoint_path": "ae.from_pretrained",
    "eval.vae_scale_factor": "ae.scale_factor",
    "eval.t5_model_dir": "t5.from_pretrained",
    "eval.txt_maxlen": "t5.max_length",
}
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
    at_least(work, words, _LEAST)
    fix_word(work, words, "denoiser.num_idx", _NUM_IDX)
    fix_word(work, words, "denoiser.quantize_c_noise", _QUANTIZE)
    if not tiny:
        fix_word(work, words, "eval.latent_channels", _CHANNELS)
    words.move(work, MOVED)
    _places(work, words)
    for name in ("eval.vae_checkpoint_path", "eval.t5_model_dir"):
        if tiny and words[name] and is_missing(words[name]):
            work.refuse(name, words.node(name), NOT_THERE, CHECK)
    if not tiny:
        words.move(work, OF_ENCODERS)
    put_dtype(work, words, "eval.dtype")
    if not words["checkpoint.init_state_dir"] and not tiny:
        fix = "give the folder of a checkpoint"
        work.report_at("command line", "checkpoint.init_state_dir", None, "names the weights, and is missing", fix)
    if not words["wandb.disable"]:
        work.say("wandb: videos are files in eval.output_dir; nothing is sent to W&B")


def _places(work: Translation, words: Words) -> None:
    """`output_dir` and `job.exp_name` -> `save_dir`, `prompt_folders`; size and length -> `sampling_option`."""
    folder = Path(words["eval.output_dir"]) / words["job.exp_name"]
    work.put("save_dir", str(folder), words.node("eval.output_dir"))
    work.put("prompt_folders", True, words.node("eval.output_dir"))
    frames = 4 * (words["eval.sampling_num_frames"] - 1) + 1
    work.put("sampling_option.num_frames", frames, words.node("eval.sampling_num_frames"))
    size = f"{words['eval.image_height']}x{words['eval.image_width']}"
    work.put("sampling_option.resolution", size, words.node("eval.image_height"))
