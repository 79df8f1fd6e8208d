"""The sequence degree of each bucket, and the ranks that compute its micro-batches together.

On a mesh of S sequence peers a bucket at degree d runs S / d micro-batches at once: the peers of a data rank fall into
S / d subgroups, each with a micro-batch of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch.distributed as dist

from longtake.contracts import Bucket, UserError
from longtake.parallel.config import ParallelConfig, divisors, divisors_in_words
from longtake.parallel.mesh import Mesh, TokenPeers
from longtake.parallel.tokens import TokenCut

EntryKey = tuple[str, int]  # of bucket_config: resolution name and frames key


def check_bucket_sequence(config: ParallelConfig, sequence: int) -> None:
    """Raise `UserError` for a degree at which `sequence` peers cannot be cut into subgroups.

    A multiple of `sequence` counts as `sequence`, so that a run can continue with the same config on fewer peers.
    """
    given = config.bucket_sequence if isinstance(config.bucket_sequence, dict) else {}
    for resolution, lengths in given.items():
        for num_frames, degree in lengths.items():
            if sequence % degree and degree % sequence:
                raise UserError(
                    f"parallel.bucket_sequence.{resolution}.{num_frames} = {degree}: does not divide "
                    f"parallel.sequence = {sequence}; choose one of {divisors_in_words(sequence)}"
                )


def bucket_degrees(
    config: ParallelConfig, sequence: int, buckets: Iterable[Bucket], tokens: Callable[[Bucket], int]
) -> dict[EntryKey, int]:
    """Return the sequence degree of every entry of the bucket table on a mesh of `sequence` peers.

    `tokens`: of one sample of a bucket, text included. `"auto"` takes the smallest degree at which no rank has more
    tokens of a micro-batch than it has of the largest entry at the whole degree.
    """
    counts: dict[EntryKey, int] = {}
    for bucket in buckets:
        counts[bucket.entry] = max(bucket.batch_size * tokens(bucket), counts.get(bucket.entry, 0))
    if (wanted := config.bucket_sequence) == "auto":
        most = max(counts.values())
        return {
            entry: next(degree for degree in divisors(sequence) if count * sequence <= most * degree)
            for entry, count in counts.items()
        }
    check_bucket_sequence(config, sequence)
    given = {} if wanted is None else wanted
    return {entry: min(sequence, given.get(entry[0], {}).get(entry[1], sequence)) for entry in counts}


@dataclass(frozen=True)
class Subgroup:
    """The ranks that compute one micro-batch together at one sequence degree. Groups of one rank are None."""

    tokens: TokenPeers | None  # None where there is no model to be cut
    data: dist.ProcessGroup | None  # for tensors of a batch
    talk: dist.ProcessGroup | None  # for objects: over the CPU, so that nothing waits for a device


@dataclass(frozen=True)
class BucketPeers:
    """The ranks that share a micro-batch of each bucket, and how many micro-batches a data rank runs at once."""

    mesh: Mesh
    degrees: Mapping[EntryKey, int]  # other entries run at the mesh's own degree
    cut: TokenCut | None  # of the model, where it has one
    by_degree: Mapping[int, Subgroup]

    @classmethod
    def create(
        cls, mesh: Mesh, degrees: Mapping[EntryKey, int] | None = None, cut: TokenCut | None = None, heads: int = 0
    ) -> BucketPeers:
        """Create the groups of every sequence degree. Collective. `cut`: the result of `cut_model` for a model of so
        many `heads`."""
        degrees = degrees or {}
        found = {}
        for degree in sorted({mesh.sequence, *degrees.values()}, reverse=True):
            tokens = None
            if cut is not None:
                tokens = cut.peers if degree == mesh.sequence else mesh.token_peers(heads, degree)
            data = mesh.subgroup(degree) if tokens is None else tokens.everyone
            found[degree] = Subgroup(tokens, data, mesh.subgroup(degree, "gloo"))
        return cls(mesh, degrees, cut, found)

    def degree(self, bucket: Bucket) -> int:
        """Sequence peers that share the tokens of a micro-batch of `bucket`."""
        return self.degrees.get(bucket.entry, self.mesh.sequence)

    def at_once(self, bucket: Bucket) -> int:
        """Micro-batches of `bucket` that the peers of one data rank run in parallel: S / d."""
        return self.mesh.sequence // self.degree(bucket)

    def place(self, bucket: Bucket) -> tuple[int, int]:
        """(which of the micro-batches run in parallel is this rank's, its place among the ranks that share it)."""
        return self.mesh.subgroup_place(self.degree(bucket))

    def count(self, bucket: Bucket) -> int:
        """Ranks that share a micro-batch of `bucket`."""
        return self.degree(bucket) * self.mesh.tensor

    def groups(self, bucket: Bucket) -> Subgroup:
        """Return the ranks that share a micro-batch of `bucket` with this one."""
        return self.by_degree[self.degree(bucket)]

    def use(self, degree: int) -> None:
        """Make the model's next forwards run at this degree."""
        tokens = self.by_degree[degree].tokens
        if self.cut is not None and tokens is not None and self.cut.peers is not tokens:
            self.cut.use(tokens)
