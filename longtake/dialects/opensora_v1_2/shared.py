"""Words of run files that Open-Sora 1.2's training and inference share: `model`, `vae`, `text_encoder`, `scheduler`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from longtake.config import load_config
from longtake.config.tree import Leaf, plain
from longtake.dialects.opensora_v1_2.flags import KERNELS
from longtake.dialects.opensora_v1_2.places import weights_keys
from longtake.dialects.translation import Fixed, Translation, value_of
from longtake.presets import FOLDER

SIZES: Mapping[str, Mapping[str, int]] = {
    "STDiT3-XL/2": {"hidden_size": 1152, "depth": 28, "num_heads": 16},
    "STDiT3-3B/2": {"hidden_size": 1872, "depth": 28, "num_heads": 26},
}
_EITHER = "folders and files of either form are read"
LEFT = {
    "model.enable_flash_attn": KERNELS,
    "model.enable_layernorm_kernel": KERNELS,
    "model.enable_sequence_parallelism": "parallel.sequence says it",
    "model.input_size": "any size fits",
    "model.force_huggingface": _EITHER,
    "vae.force_huggingface": _EITHER,
    "vae.freeze_vae_2d": "the autoencoder does not train",
    "vae.cal_loss": "the autoencoder does not train",
    "num_bucket_build_workers": "the order of a pass is arithmetic on columns; no workers are needed",
}
FIXED = {
    "model.skip_y_embedder": Fixed(
        (False, None), "", "it was for stored features; `longtake data encode` stores texts as T5 gives them"
    ),
    "model.drop_path": Fixed((0, 0.0, None), "", "blocks are not left out"),
    "vae.type": Fixed(("OpenSoraVAE_V1_2",), "", "other autoencoders are not read for this model"),
    "text_encoder.type": Fixed(("t5",), "", "captions are read by T5"),
    "scheduler.type": Fixed(("rflow",), "", "it learns velocities of rectified flow"),
    "scheduler.num_timesteps": Fixed((1000, None), "", "times go from 0 to 1000"),
}
MOVED = {
    "vae.from_pretrained": "ae.from_pretrained",
    "vae.micro_frame_size": "ae.micro_frame_size",
    "vae.micro_batch_size": "ae.micro_batch_size",
    "text_encoder.from_pretrained": "t5.from_pretrained",
    "text_encoder.model_max_length": "t5.max_length",
    "text_encoder.shardformer": "t5.shardformer",
    "scheduler.use_timestep_transform": "objective.use_timestep_transform",
    "scheduler.sample_method": "objective.sample_method",
    "scheduler.use_discrete_timesteps": "objective.use_discrete_timesteps",
    "scheduler.loc": "objective.timestep_mean",
    "scheduler.scale": "objective.timestep_std",
    "scheduler.transform_scale": "objective.transform_scale",
    "scheduler.num_sampling_steps": "sampling_option.num_steps",
    "scheduler.cfg_scale": "sampling_option.guidance",
}
_WHOLE = 10**6  # frames at once: more than a clip has, so that it is coded whole
_SECTIONS = ("vae", "text_encoder", "scheduler")
_SCHEDULER = {"sample_method": "uniform", "use_timestep_transform": False}  # where a file leaves them out
_HUB_VAE = "hpcai-tech/OpenSora-VAE-v1.2"


def is_old(work: Translation) -> bool:
    """Whether a file has words of Open-Sora 1.2, which no preset has."""
    names = [name for name in (*_SECTIONS, "mask_ratios") if work.get(name) is not None]
    return bool(names) or str(work.value("model.type")).startswith("STDiT")


def lay(work: Translation, name: str, value: Any) -> bool:
    """Puts a value where nothing is written; returns whether nothing was."""
    if work.get(name) is not None:
        return False
    work.put(name, value, work.tree)
    return True


def translate_parts(work: Translation, old: bool, tiny: bool, trains: bool = True) -> None:
    """The four sections -> `model`, `ae`, `t5`, `objective`. old: `is_old`, of the tree as it was."""
    if (kind := work.get("model.type")) is not None and plain(kind) in SIZES:
        work.take("model.type")
        for key, size in SIZES[str(plain(kind))].items():
            if work.get(f"model.{key}") is None:
                work.put(f"model.{key}", size, kind)
        work.put("model.type", "stdit3", kind)
    elif kind is not None and str(plain(kind)).startswith("STDiT"):
        work.take("model.type")
        work.refuse("model.type", kind, "is not here", f"choose {' or '.join(SIZES)}")
    if old:  # a preset says by itself how its weights are taken
        _weights(work)
    _defaults(work, trains)
    if tiny:  # which has encoders of its own
        for section in ("vae", "text_encoder"):
            work.take(section)
    work.leave(LEFT)
    work.fix(FIXED)
    for name in ("micro_frame_size", "micro_batch_size"):
        if (node := work.get(f"vae.{name}")) is not None and value_of(node) is None:
            work.take(f"vae.{name}")
            work.put(f"ae.{name}", _WHOLE, node)
    work.drop_none(MOVED)
    work.move(MOVED)
    _autoencoder(work)
    for section in _SECTIONS:
        known = (name for name in (*MOVED, *LEFT, *FIXED) if name.startswith(section))
        work.refuse_rest(section, (name.partition(".")[2] for name in known))
    if old:
        for section, keys in _parts().items():
            own = {} if tiny and section in ("ae", "t5") else keys
            for key, value in own.items():
                lay(work, f"{section}.{key}", value)


def _weights(work: Translation) -> None:
    """`model.from_pretrained` of a file, as `--ckpt-path` there."""
    node = work.get("model.from_pretrained")
    if not isinstance(node, Leaf) or not isinstance(node.value, str) or work.heights.is_flag(node.origin):
        return
    for key, value in weights_keys(node.value).items():
        if key == "model.from_pretrained" and value != node.value:
            work.note(key, node, f"its weights are in {value}")
            work.put(key, value, node)
        elif work.get(key) is None:
            work.put(key, value, node)


def _defaults(work: Translation, trains: bool) -> None:
    node = work.get("scheduler")
    if node is None or isinstance(node, Leaf):
        return
    for key, value in _SCHEDULER.items():
        if not trains and key == "sample_method":
            continue
        if work.get(f"scheduler.{key}") is None and work.get(f"objective.{key}") is None:
            work.say(f"scheduler.{key}: is not in the file, and Open-Sora's default is {value}")
            work.put(f"scheduler.{key}", value, node)


def _autoencoder(work: Translation) -> None:
    """A folder of the autoencoder's -> the file in it."""
    node = work.get("ae.from_pretrained")
    if not isinstance(node, Leaf) or not isinstance(node.value, str):
        return
    if node.value == _HUB_VAE or (Path(node.value) / "model.safetensors").is_file():
        work.put("ae.from_pretrained", f"{node.value}/model.safetensors", node)


@cache
def _parts() -> dict[str, Any]:
    tree = load_config(FOLDER / "opensora_v1_2" / "parts.py", [], dict[str, Any]).tree
    kinds = {section: {"type": tree[section]["type"]} for section in ("model", "objective")}
    return {**kinds, "ae": tree["ae"], "t5": tree["t5"]}
