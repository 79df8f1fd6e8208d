"""Schedule of videos: which are made at once, and how many ranks make each of them together, so that no rank waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from longtake.contracts import UserError
from longtake.generate.config import GenerateConfig
from longtake.generate.requests import Video
from longtake.models.build import denoiser_class
from longtake.parallel.config import AXES, ParallelConfig, divisors
from longtake.parallel.mesh import Mesh
from longtake.parallel.world import World

_One = TypeVar("_One")


def alike(videos: Sequence[Video]) -> list[list[Video]]:
    """Return the videos in groups whose members can be made at once: with references or without, with the same
    clips, kinds of known frames and options, so that all ranks run as many steps and guidance branches, by scales of
    one law."""
    groups: dict[Any, list[Video]] = {}
    for video in sorted(videos, key=lambda video: not video.refs):
        clips = ((one.strength, one.carries, one.kind, *(name for name, _ in one.brings)) for one in video.prompt.clips)
        options = (option for option in video.prompt.options if option[0] != "seed")
        groups.setdefault((bool(video.refs), *options, *clips), []).append(video)
    return list(groups.values())


def batches_of(group: Sequence[_One], size: int, ranks: int) -> list[Sequence[_One]]:
    """Batches of `size` videos, of fewer where there would be no batch for every rank."""
    size = min(size, max(1, len(group) // ranks))
    return [group[first : first + size] for first in range(0, len(group), size)]


def rounds(count: int, ranks: int, degrees: Sequence[int]) -> Iterator[tuple[range, int]]:
    """`count` batches in rounds on so many ranks: which are made at once, and how many ranks make each of them.

    degrees: how many ranks can make a batch together, ascending divisors of `ranks`. As many batches as there are ranks
    are made by one each; those that are left by the fewest that leave none idle. Beyond the last degree some are.
    """
    first = 0
    for degree in degrees:
        at_once = ranks // degree
        while count - first >= at_once or (degree == degrees[-1] and first < count):
            yield range(first, min(count, first + at_once)), degree
            first += at_once


def degrees_of(config: GenerateConfig, mesh: Mesh) -> list[int]:
    """Return the sequence degrees at which ranks of a mesh may make a video together: the config's, else any."""
    return [mesh.sequence] if says_degrees(config) else divisors(mesh.sequence)


def share_out(
    config: GenerateConfig, videos: Sequence[Video], world: World, say: Callable[[str], None]
) -> ParallelConfig:
    """Return the degrees for these videos: the config's where it says some, else with as many sequence peers as the
    model allows where videos are too few for all ranks at some time."""
    counts = [len(batches_of(group, config.batch_size, world.size)) for group in alike(videos)]
    if says_degrees(config) or not any(count % world.size for count in counts):
        return config.parallel
    kind, fault = denoiser_class(config.model), ""
    for degree in reversed(divisors(world.size)):
        parallel = config.parallel.model_copy(update={"sequence": degree})
        try:
            mesh = Mesh(1, world.size // degree, degree, 1, world.rank, parallel, weights=None)
            mesh.check_model(kind, kind.heads(config.model))
        except UserError as error:
            fault = fault or str(error)
            continue
        if any(count % (world.size // degree) for count in counts):
            say(f"some of {world.size} processes wait at the end: {fault}")
        return parallel
    raise AssertionError("one rank can make a video")


def says_degrees(config: GenerateConfig) -> bool:
    return bool(config.parallel.model_fields_set & set(AXES))
