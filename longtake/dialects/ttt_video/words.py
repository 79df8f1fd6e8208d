"""The keys of TTT-Video's TOML files, by section, each with the value that it has where nothing is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from longtake.dialects.command_line import as_flag, split

OF_TRAINING: Mapping[str, Mapping[str, Any]] = {
    "job": {"exp_name": "default job", "dump_folder": None, "seed": 42},
    "model": {
        **{"name": "cogvideo", "size": "5B", "video_length": "3sec", "norm_eps": 1e-6, "scale_factor": 1.0},
        **{"ssm_layer": "ttt_mlp", "ttt_base_lr": 0.1, "mini_batch_size": 64},
    },
    "training": {
        **{"adapter_method": None, "dataset_path": None, "jsonl_paths": None, "empty_prompt": None},
        **{"global_batch_size": 8, "grad_accum_steps": 1, "warmup_steps": 50, "steps": 5000, "gc_freq": 50},
    },
    "optimizer": {
        **{"name": "AdamW", "lr": 1e-4, "lr_end": 0.0, "lr_ssm": 1e-4, "lr_schedule": "linear"},
        **{"lr_ssm_schedule": "linear", "gradient_clipping_norm": 0.1},
    },
    "checkpoint": {"init_state_dir": None, "interval": 0, "resume": False, "resume_step": -1, "timeout_minutes": 0},
    "parallelism": {"fsdp_unsharded_dtype": "bfloat16", "tp_sharding": 1, "dp_sharding": 8, "dp_replicate": 1},
    "remat": {
        **{"transformer_checkpoint_layer_group_size": 1, "scan_checkpoint_group_size": 16, "forward_ssm": False},
        **{"reverse_ssm": False, "attention": False, "mlp": False, "seq_modeling_block": False},
        "shard_transformer_inputs": False,
    },
    "comm": {"init_timeout_seconds": 1200},
    "wandb": {"disable": False, "project": "ttt-video", "entity": "default", "log_interval": 50, "alert": False},
}
OF_SAMPLING: Mapping[str, Mapping[str, Any]] = {
    **OF_TRAINING,
    "eval": {
        **{"input_file": None, "output_dir": "./output", "image_width": 720, "image_height": 480, "sampling_fps": 16},
        **{"sampling_num_frames": 13, "latent_channels": 16, "num_denoising_steps": 50, "scale_factor": 0.7},
        **{"dtype": "bfloat16", "vae_checkpoint_path": None, "vae_scale_factor": 1.0, "txt_maxlen": 498},
        "t5_model_dir": None,
    },
    "guider": {"scale": 6, "exp": 5, "num_steps": 50},
    "denoiser": {"num_idx": 1000, "quantize_c_noise": False},
    "discretization": {"shift_scale": 1.0},
}
_TEXTS = frozenset(  # texts by their kind, of which the defaults do not tell
    {
        *("job.dump_folder", "training.adapter_method", "training.dataset_path", "training.jsonl_paths"),
        *("training.empty_prompt", "checkpoint.init_state_dir", "eval.input_file", "eval.vae_checkpoint_path"),
        "eval.t5_model_dir",
    }
)
CONFIG_FILE = "job.config_file"


def sections_of(verb: str) -> Mapping[str, Mapping[str, Any]]:
    """Section -> key -> default, of `train.py`, or of `sample.py`."""
    return OF_TRAINING if verb == "train" else OF_SAMPLING


def read_flags(words: Sequence[str], verb: str) -> tuple[str | None, dict[str, str], list[str]]:
    """The run file that `--job.config_file` names; the keys that are given, each by name as one flag that keeps texts
    texts; and all other words."""
    defaults = {f"{section}.{key}": value for section, keys in sections_of(verb).items() for key, value in keys.items()}
    arities = {name: int(not isinstance(value, bool)) for name, value in defaults.items()}
    given, groups = split(words, {**arities, CONFIG_FILE: 1}, _plain)
    run = "".join(given.pop(CONFIG_FILE)) if CONFIG_FILE in given else None
    flags = {}
    for name, values in given.items():
        is_text = name in _TEXTS or isinstance(defaults[name], str)
        flags[name] = as_flag(name, values, is_text and not "".join(values).startswith(("[", "(")))
    return run, flags, [word for group in groups for word in group]


def _plain(name: str) -> str:
    section, _, key = name.partition(".")
    return f"{section}.{key.replace('-', '_')}"
