"""`--tiny`: any run or generation at a size that a CPU handles in seconds, to try a preset, a table or a cluster.

Sizes change and nothing else: the same conditions, objective, optimizer, peers, recomputation and adapters, on the
user's own clips. Weights and encoders of full size do not fit such a model and are left out.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from typing import Any

from longtake.buckets import num_pixels
from longtake.contracts import UserError

TINY = "--tiny"
_LONGEST = 17  # frames of a clip
_STILLS, _CLIPS = 4, 2  # most in a micro-batch
_CELL = 16  # pixels along one side of a token
_WIDTH, _WORDS, _RANK = 128, 64, 4
_BUFFER_BYTES = 2**20
_DEGREES = ("tensor", "sequence", "replicate", "shard")  # in the order in which they get their part of the world


def tiny_layer(tree: Mapping[str, Any], world_size: int) -> dict[str, Any]:
    """What is laid over a run's tree (as its files say it) to make it tiny; flags go on top.

    Degrees of `parallel` become the largest divisors of theirs that `world_size` processes allow. A run that is tiny
    already stays as it is.
    """
    model, parallel = _section(tree, "model"), _section(tree, "parallel")
    patch = model.get("patch_size", 2)
    layer: dict[str, Any] = {
        "model": _model(model, patch),
        "ae": {"_delete_": True, "type": "pixel", "temporal": 1, "spatial": _CELL // patch},
        "t5": {"_delete_": True, "type": "words", "dim": _WORDS, "max_length": 16},
        "clip": {"_delete_": True, "type": "words", "dim": _WORDS, "max_length": 16},
        "ae_spatial_compression": None,
        "compile": False,
        "num_workers": 0,
    }
    if isinstance(tree.get("lora"), Mapping):
        layer["lora"] = {"rank": _RANK, "from_pretrained": None}
    if isinstance(buckets := tree.get("bucket_config"), Mapping):
        layer["bucket_config"] = {"_delete_": True, **_buckets(buckets)}
    if _section(tree, "dataset").get("latents") is not None:
        layer["dataset"] = {"latents": None}
    if degrees := _degrees(parallel, world_size):
        layer["parallel"] = degrees
    if option := _sampling(_section(tree, "sampling_option")):
        layer["sampling_option"] = option
    if isinstance(image := tree.get("img_flux"), Mapping):
        layer["img_flux"] = _model(image, cells := image.get("patch_size", 2))
        layer["img_flux_ae"] = {"_delete_": True, "type": "pixel", "temporal": 1, "spatial": _CELL // cells}
        layer["img_resolution"] = _resolution(str(tree.get("img_resolution", "768px")))
    return layer


def is_tiny(tree: Mapping[str, Any]) -> bool:
    """Whether the model of a tree has the tiny sizes already."""
    model = _section(tree, "model")
    sizes = _model(model, model.get("patch_size", 2))
    found = {name: tuple(value) if isinstance(value, list) else value for name, value in model.items()}
    return all(found.get(name) == sizes[name] for name in ("hidden_size", "depth", "depth_single_blocks", "axes_dim"))


def world_size() -> int:
    """How many processes the launcher has started, before they have joined."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _section(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A section of the tree; nothing where there is none, or no section, which the schema will refuse."""
    found = tree.get(name)
    return found if isinstance(found, Mapping) else {}


def _model(model: Mapping[str, Any], patch: int) -> dict[str, Any]:
    tiny: dict[str, Any] = {
        "from_pretrained": None,
        "in_channels": 3 * _CELL**2,  # a token's pixels, however cells and patches share them
        "patch_size": patch,
        "vec_in_dim": _WORDS,
        "context_in_dim": _WORDS,
        "hidden_size": _WIDTH,
        "num_heads": 8,  # for up to 8 peers
        "mlp_ratio": 4.0,
        "depth": 1,
        "depth_single_blocks": 2,
        "axes_dim": (4, 6, 6),
    }
    if model.get("grad_ckpt_buffer_size"):
        tiny["grad_ckpt_buffer_size"] = _BUFFER_BYTES
    return tiny


def _buckets(buckets: Mapping[str, Any]) -> dict[str, Any]:
    """The table with small resolutions, short clips and small micro-batches; of entries that become one, the first."""
    tiny: dict[str, dict[int, Any]] = {}
    for name, lengths in buckets.items():
        if not isinstance(lengths, Mapping):
            continue
        of_name = tiny.setdefault(_resolution(str(name)), {})
        for frames, entry in lengths.items():
            if str(frames).isdigit() and isinstance(entry, (tuple, list)) and len(entry) == 2:
                length = min(int(frames), _LONGEST)
                of_name.setdefault(length, (entry[0], _batch(length, entry[1])))
    return tiny


def _batch(length: int, size: Any) -> Any:
    return min(size, _STILLS if length == 1 else _CLIPS) if isinstance(size, int) else size


def _resolution(name: str) -> str:
    """32px for what has up to 512 x 512 pixels, 64px above; a name that says more than the size keeps that."""
    try:
        side = math.isqrt(num_pixels(name))
    except UserError:
        return name  # the schema will refuse it
    suffix = "".join(re.findall(r"_.*", name))
    return name if side <= 64 else f"{32 if side <= 512 else 64}px{suffix}"


def _degrees(parallel: Mapping[str, Any], world_size: int) -> dict[str, Any]:
    left, tiny = world_size, {}
    for axis in _DEGREES:
        if isinstance(degree := parallel.get(axis), int):
            tiny[axis] = math.gcd(degree, left)
            left //= tiny[axis]
    if "shard" in tiny and "auto" not in parallel.values():
        tiny["shard"] *= left  # nothing else takes the ranks that are left
    if isinstance(parallel.get("bucket_sequence"), Mapping):
        tiny["bucket_sequence"] = None  # its entries are gone
    return tiny


def _sampling(option: Mapping[str, Any]) -> dict[str, Any]:
    tiny: dict[str, Any] = {}
    if isinstance(name := option.get("resolution"), str):
        tiny["resolution"] = _resolution(name)
    for key, most in (("num_frames", _LONGEST), ("num_steps", 4)):
        if isinstance(number := option.get(key), int):
            tiny[key] = min(number, most)
    return tiny
