"""The size of videos that a training run is sampled at where its file leaves it open: that of its buckets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longtake.buckets import aspect_table, num_pixels
from longtake.buckets.entries import read_entries
from longtake.config import resolve
from longtake.contracts import UserError
from longtake.encoders import AutoencoderConfig, check_shape
from longtake.system.config import SystemConfig


def said_sampling(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of `sampling_option` to which a run's config, as plain data, gives a value."""
    return {key: value for key, value in (tree.get("sampling_option") or {}).items() if value is not None}


def trained_size(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The size keys of `sampling_option` that a run's config, as plain data, leaves open, as its buckets decide them.

    `resolution`: the largest one that trains clips of several frames; where only stills are trained, the largest of
    these. `num_frames`: its longest length that the autoencoder can give back. `aspect_ratio`: only where the name of
    the resolution leaves a single one, as in `256px_ar1:1`. Nothing is decided for a run without buckets. Raises
    `UserError` for a config that is damaged.
    """
    if not isinstance(tree.get("bucket_config"), Mapping):
        return {}
    own = {key: value for key, value in tree.items() if key in SystemConfig.model_fields and key != "parallel"}
    config = resolve(own, [], SystemConfig, place="the run's config.py").value
    divisor, compat = config.size_divisor, config.compat
    trained = [
        (entry.num_frames > 1, num_pixels(name, compat), entry.num_frames, name)
        for name, entries in read_entries(tree["bucket_config"], divisor, compat=compat).items()
        for entry in entries
        if entry.reachable and _has_length(config.ae, entry.num_frames)
    ]
    if not trained:
        return {}
    _, _, num_frames, name = max(trained)
    resolution, _, narrowed = name.partition("_")
    size: dict[str, Any] = {"resolution": resolution, "num_frames": num_frames}
    if narrowed:
        (size["aspect_ratio"],) = aspect_table(name, divisor, compat=compat)
    said = said_sampling(tree)
    return {key: value for key, value in size.items() if key not in said}


def _has_length(ae: AutoencoderConfig, num_frames: int) -> bool:
    """Whether an autoencoder can give back so many frames."""
    try:
        check_shape(ae, num_frames, ae.latent.spatial, ae.latent.spatial)
    except UserError:
        return False
    return True
