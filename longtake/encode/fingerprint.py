"""What decides the contents of a latent store, as plain data that can be compared and shown."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from longtake.buckets import BucketRule
from longtake.data import DatasetConfig
from longtake.encoders import KLAutoencoder
from longtake.system import Encoders, SystemConfig

PIXELS = 1  # raised when equal settings begin to give other frames, pixels or captions


def make_fingerprint(config: SystemConfig, dataset: DatasetConfig, rule: BucketRule, stage: int) -> dict[str, Any]:
    """Key of the config -> value, of everything but the clips that latents and embeddings depend on. Fit for JSON.

    Batch sizes are left out: they decide which samples stand side by side, not what a sample is.
    """
    facts = rule.to_json()
    entries = {
        name: {frames: keep for frames, (keep, _) in lengths.items()}
        for name, lengths in facts["bucket_config"].items()
    }
    found: dict[str, Any] = {
        "seed": config.seed,
        "stage": stage,
        "compat": config.compat,
        "dataset.views": dataset.views,
        "dataset.fps_max": dataset.fps_max,
        "dataset.captions": [list(pair) for pair in (dataset.captions or {"text": 1.0}).items()],
        "dataset.vmaf": dataset.vmaf,
        "pixels": PIXELS,
        "dataset.transform_name": dataset.transform_name,
        "bucket_config": entries,
        "size_divisor": facts["divisor"],
        "frame_interval": facts.get("frame_interval", 1),
        "ae": config.ae.content(),
        "t5": config.t5.content(),
        "clip": config.clip.content(),
    }
    return json.loads(json.dumps(found))


def differences(present: Mapping[str, Any], stored: Mapping[str, Any], place: str = "") -> list[str]:
    """Every key whose values differ, with both: `seed is 8 here and 7 in the store`."""
    found = []
    for name in dict.fromkeys([*present, *stored]):
        key = f"{place}.{name}" if place else name
        here, there = present.get(name, _ABSENT), stored.get(name, _ABSENT)
        if isinstance(here, Mapping) and isinstance(there, Mapping):
            found += differences(here, there, key)
        elif here != there:
            found.append(f"{key} is {_shown(here)} here and {_shown(there)} in the store")
    return found


def weights_digest(encoder: object) -> str | None:
    """16 hex digits over the names, types and bytes of an encoder's weights; None for one without weights."""
    state = encoder.state_dict() if isinstance(encoder, nn.Module) else {}
    state = encoder.encoding_state() if isinstance(encoder, KLAutoencoder) else state  # decoders may not be loaded
    if not state:
        return None
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(state.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor  # collective
        digest.update(whole.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def encoder_digests(encoders: Encoders) -> dict[str, str | None]:
    """The digest of each encoder's weights."""
    return {name: weights_digest(getattr(encoders, name)) for name in ("autoencoder", "text", "pooled")}


class _Absent:
    """The value of a key that is not there."""


_ABSENT = _Absent()


def _shown(value: object) -> str:
    return "nothing" if value is _ABSENT else json.dumps(value)
