"""`--tiny`: any run or generation at a size that a CPU handles in seconds, to try a preset, a table or a cluster.

Sizes change and nothing else; weights and encoders of full size do not fit such a model and are left out.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from longtake.buckets.aspect import lists_sizes, num_pixels
from longtake.contracts import UserError
from longtake.families.record import Family
from longtake.families.registry import family_of_tree

TINY = "--tiny"
_LONGEST = 17  # frames of a clip
_STILLS, _CLIPS = 4, 2  # most in a micro-batch
_RANK = 4
_KEPT = ("from_pretrained", "patch_size", "grad_ckpt_buffer_size")  # which say nothing of the size
_DEGREES = ("tensor", "sequence", "replicate", "shard")  # in the order in which they get their part of the world


def take_tiny(words: Sequence[str]) -> tuple[list[str], bool]:
    """Return a command line without `--tiny`, and whether that was in it."""
    return [word for word in words if word != TINY], TINY in words


def tiny_layer(tree: Mapping[str, Any], world_size: int) -> dict[str, Any]:
    """Return the overrides that make a run tiny, from its tree as files give it; flags go on top. Degrees of
    `parallel` become the largest divisors of theirs that `world_size` processes allow."""
    family, parallel = family_of_tree(tree), _section(tree, "parallel")
    law = _law(family, tree)
    layer: dict[str, Any] = {
        **_parts(family, _section(tree, "model")),
        "ae_spatial_compression": None,
        "compile": False,
        "num_workers": 0,
    }
    if isinstance(tree.get("lora"), Mapping):
        layer["lora"] = {"rank": _RANK, "from_pretrained": None}
    if isinstance(low_noise := tree.get("low_noise"), Mapping):
        layer["low_noise"] = {**low_noise, "from_pretrained": None, "lora": None}
    if family.sizes is not None and isinstance(sizes := tree.get("sizes"), Mapping):
        layer["sizes"] = family.sizes.tiny(sizes)
    if isinstance(buckets := tree.get("bucket_config"), Mapping) and buckets:
        layer["bucket_config"] = {"_delete_": True, **_buckets(buckets, law)}
    if _section(tree, "dataset").get("latents") is not None:
        layer["dataset"] = {"latents": None}
    if degrees := _degrees(parallel, world_size):
        layer["parallel"] = degrees
    if option := _sampling(_section(tree, "sampling_option"), law):
        layer["sampling_option"] = option
    if option := _sampling(_section(_section(tree, "validation"), "sampling_option"), law):
        layer["validation"] = {"sampling_option": option}
    if isinstance(image := tree.get("img_flux"), Mapping):
        own = _parts(family_of_tree({"model": image}), image)
        layer["img_flux"], layer["img_flux_ae"] = own["model"], own["ae"]
        layer["img_resolution"] = _resolution(str(tree.get("img_resolution", "768px")), None)
    return layer


def is_tiny(tree: Mapping[str, Any]) -> bool:
    model = _section(tree, "model")
    sizes = family_of_tree(tree).tiny(model)["model"]
    found = {name: tuple(value) if isinstance(value, list) else value for name, value in model.items()}
    return all(found.get(name) == size for name, size in sizes.items() if name not in _KEPT)


def _parts(family: Family, model: Mapping[str, Any]) -> dict[str, Any]:
    parts = family.tiny(model)
    return {name: part if name == "model" else {"_delete_": True, **part} for name, part in parts.items()}


def world_size() -> int:
    """Return the number of processes that the launcher has started, before they have joined."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _section(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section of the tree; nothing where there is none, or no section, which the schema will refuse."""
    found = tree.get(name)
    return found if isinstance(found, Mapping) else {}


def _law(family: Family, tree: Mapping[str, Any]) -> str | None:
    """Return the key of the run's law of buckets."""
    try:
        return family.bucket_law(family.quirks_of(tree.get("compat")))
    except (ValueError, TypeError):  # the schema will refuse `compat`
        return None


def _buckets(buckets: Mapping[str, Any], law: str | None) -> dict[str, Any]:
    """Return the table with small resolutions, short clips and small micro-batches; of entries that become one, the
    first."""
    tiny: dict[str, dict[int, Any]] = {}
    for name, lengths in buckets.items():
        if not isinstance(lengths, Mapping):
            continue
        of_name = tiny.setdefault(_resolution(str(name), law), {})
        for frames, entry in lengths.items():
            if str(frames).isdigit() and isinstance(entry, (tuple, list)) and len(entry) == 2:
                length = min(int(frames), _LONGEST)
                size = min(entry[1], _STILLS if length == 1 else _CLIPS) if isinstance(entry[1], int) else entry[1]
                of_name.setdefault(length, (entry[0], size))
    return tiny


def _resolution(name: str, law: str | None) -> str:
    """32px for what has up to 512 x 512 pixels, 64px above; a name that says more than the size keeps that. Under a law
    that lists its sizes, a square of that side."""
    try:
        side = math.isqrt(num_pixels(name, law))
    except UserError:
        return name  # the schema will refuse it
    small = 32 if side <= 512 else 64
    if lists_sizes(law):
        return name if side <= 64 else f"{small}x{small}"
    suffix = "".join(re.findall(r"_.*", name))
    return name if side <= 64 else f"{small}px{suffix}"


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


def _sampling(option: Mapping[str, Any], law: str | None) -> dict[str, Any]:
    tiny: dict[str, Any] = {}
    if isinstance(name := option.get("resolution"), str):
        tiny["resolution"] = _resolution(name, law)
    for key, most in (("num_frames", _LONGEST), ("num_steps", 4)):
        if isinstance(number := option.get(key), int):
            tiny[key] = min(number, most)
    return tiny
