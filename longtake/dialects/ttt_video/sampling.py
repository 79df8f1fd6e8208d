"""Conversions of the keys of `sample.py`."""

from __future__ import annotations

from pathlib import Path

from longtake.dialects.table import apply_rows, keys_of
from longtake.dialects.tiny_weights import CHECK, NOT_THERE, is_missing
from longtake.dialects.translation import Translation
from longtake.dialects.ttt_video.keys import ENCODERS, SAMPLING, TRAINING


def translate_sampling(work: Translation, tiny: bool) -> None:
    """All that `sample.py` reads in addition to the model."""
    if idle := [key for key in keys_of(TRAINING) if work.is_given(key)]:
        work.say(f"{', '.join(idle)}: only read by train.py")
    if not work.value("wandb.disable"):
        work.say("wandb: videos are files in eval.output_dir; nothing is sent to W&B")
    _places(work)
    for key in ("eval.vae_checkpoint_path", "eval.t5_model_dir"):
        path = work.value(key)
        if tiny and path is not None and is_missing(path):
            work.refuse(key, work.place(key), NOT_THERE, CHECK)
    if not work.value("checkpoint.init_state_dir") and not tiny:
        fix = "give the folder of a checkpoint"
        work.report_at("command line", "checkpoint.init_state_dir", None, "names the weights, and is missing", fix)
    apply_rows(work, SAMPLING)
    if not tiny:
        apply_rows(work, ENCODERS)


def _places(work: Translation) -> None:
    """`output_dir` and `job.exp_name` -> `save_dir`, `prompt_folders`; the size -> `sampling_option.resolution`."""
    folder = Path(work.value("eval.output_dir")) / work.value("job.exp_name")
    work.put("save_dir", str(folder), work.place("eval.output_dir"))
    work.put("prompt_folders", True, work.place("eval.output_dir"))
    size = f"{work.value('eval.image_height')}x{work.value('eval.image_width')}"
    work.put("sampling_option.resolution", size, work.place("eval.image_height"))
