"""Which ranks compute each bucket together, and how many micro-batches a slot of it has."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from longtake.contracts import Bucket
from longtake.parallel import BucketPeers, Entry, Mesh, bucket_degrees
from longtake.system import System
from longtake.train.config import RunConfig


def bucket_peers(config: RunConfig, system: System, mesh: Mesh, buckets: Sequence[Bucket]) -> BucketPeers:
    """The peers of every entry of the bucket table, as `parallel.bucket_sequence` wants them. Collective."""

    def tokens(bucket: Bucket) -> int:
        return system.tokens(bucket.shape) + system.facts.text_length

    degrees = bucket_degrees(config.parallel, mesh.sequence, buckets, tokens)
    return BucketPeers.create(mesh, degrees, system.cut, config.model.num_heads)


def slot_sizes(
    config: RunConfig, peers: BucketPeers, buckets: Sequence[Bucket], state: Mapping[str, Any]
) -> dict[Entry, int]:
    """Micro-batches of a slot of each entry: those that the peers of one data rank run side by side.

    They are settled at first launch, so that other meshes make the same steps: as long as the setting and the batch
    sizes are those of the checkpoint's `run.json` (`state`), its sizes stay.
    """
    kept = state.get("slot_sizes")
    if kept is not None and kept["of"] == _basis(config, buckets):
        return {(name, int(t)): size for name, sizes in kept["sizes"].items() for t, size in sizes.items()}
    return {(bucket.resolution, bucket.num_frames): peers.at_once(bucket) for bucket in buckets}


def slot_sizes_json(config: RunConfig, sizes: Mapping[Entry, int], buckets: Sequence[Bucket]) -> dict[str, Any]:
    """The sizes, and what they follow from, for `run.json`."""
    found: dict[str, dict[str, int]] = {}
    for (name, num_frames), size in sizes.items():
        found.setdefault(name, {})[str(num_frames)] = size
    return {"of": _basis(config, buckets), "sizes": found}


def _basis(config: RunConfig, buckets: Sequence[Bucket]) -> Any:
    """The setting, and the batch sizes that an "auto" weighs, as they come back from JSON."""
    batch_sizes = {f"{bucket.resolution}/{bucket.num_frames}": bucket.batch_size for bucket in buckets}
    return json.loads(json.dumps([config.parallel.bucket_sequence, batch_sizes], sort_keys=True))
