"""The interface of video autoencoders: pixels to the posterior of the latents and back, whole or streamed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pkgutil import resolve_name
from types import MappingProxyType

import torch
from torch import Tensor, nn

from longtake.contracts import LatentShape
from longtake.encoders.autoencoder_config import AutoencoderSection
from longtake.parallel.shared_work import Tile


class Autoencoder(ABC):
    """Video `[B, 3, T, H, W]` in [-1, 1] <-> latents `[B, C, F, h, w]`; the config says which shape makes which.

    Training, encoding ahead and generation go through the two streams, which take or give a video in chunks of frames.
    By default there is one chunk, the whole video; an autoencoder for long videos overrides them, and may carry a cache
    from chunk to chunk.

    One with weights has its modules in `encoding` and `decoding`, by names with which those of their tensors begin.
    `decode` calls `load_decoder` first, which reads the modules of `decoding` once. With `placement = "offloaded"`, a
    module of several layers is on the device only while it is called.
    """

    config: AutoencoderSection
    is_random: bool  # whether latents are drawn from a posterior
    stream_frames: int | None = None  # of a chunk of a stream, the last one may have fewer; None: the whole video
    encoding: Mapping[str, nn.Module] = MappingProxyType({})  # what latents depend on
    decoding: Mapping[str, nn.Module] = MappingProxyType({})  # what is needed for decoding only
    load_decoder: Callable[[], None] = staticmethod(lambda: None)
    dtype: torch.dtype = torch.float32  # of the results of tiles
    # Runs the tiles of an encoding or decoding; it may be replaced by one that shares them with other ranks, and its
    # results may be written into. None: nothing is cut into tiles, each rank computes all of it.
    compute: Callable[[Sequence[Tile]], list[Tensor]] | None = None

    @property
    def latent(self) -> LatentShape:
        """How pixels map to latents."""
        return self.config.latent

    def check(self, num_frames: int, height: int, width: int) -> None:
        """Raise `UserError` for a shape that the autoencoder cannot give back."""
        self.config.check(num_frames, height, width)

    def names(self, files: Collection[str]) -> dict[str, str]:
        """Name of each tensor of the parts -> its name in a published file, which has `files`."""
        return {name: name for name in files}

    @abstractmethod
    def posterior(self, video: Tensor) -> dict[str, Tensor]:
        """Pixels -> "mean" and, where it is random, "std" of the latents."""

    @abstractmethod
    def decode(self, latents: Tensor, num_frames: int) -> Tensor:
        """Latents -> pixels, of the first `num_frames` frames."""

    def stream_lengths(self, num_frames: int) -> list[int]:
        """How a video of so many frames is cut into the chunks that `posterior_of_stream` takes."""
        size = self.stream_frames or num_frames
        return [min(size, num_frames - start) for start in range(0, num_frames, size)]

    def posterior_of_stream(self, video: Iterable[Tensor]) -> Iterator[dict[str, Tensor]]:
        """Chunks of a video `[B, 3, t, H, W]`, in order -> its posterior, in chunks of some length, in order."""
        yield self.posterior(torch.cat(list(video), dim=2))

    def decode_stream(self, latents: Tensor, num_frames: int) -> Iterator[Tensor]:
        """Latents of a whole video -> its pixels, in chunks of some length, in order."""
        yield self.decode(latents, num_frames)


class ChunkedAutoencoder(Autoencoder):
    """One to which each `latent.chunk` frames of a video are a clip of their own, as are the fewer at its end."""

    def __init__(self, config: AutoencoderSection, dtype: torch.dtype = torch.float32) -> None:
        self.config, self.stream_frames = config, config.latent.chunk

    @abstractmethod
    def posterior_of_chunk(self, video: Tensor) -> dict[str, Tensor]:
        """`posterior` of one chunk."""

    @abstractmethod
    def decode_chunk(self, latents: Tensor, num_frames: int) -> Tensor:
        """`decode` of one chunk."""

    def posterior(self, video: Tensor) -> dict[str, Tensor]:
        found = list(self.posterior_of_stream(video.split(self.stream_frames, dim=2)))
        return {name: torch.cat([part[name] for part in found], dim=2) for name in found[0]}

    def decode(self, latents: Tensor, num_frames: int) -> Tensor:
        return torch.cat(list(self.decode_stream(latents, num_frames)), dim=2)

    def posterior_of_stream(self, video: Iterable[Tensor]) -> Iterator[dict[str, Tensor]]:
        return map(self.posterior_of_chunk, video)

    def decode_stream(self, latents: Tensor, num_frames: int) -> Iterator[Tensor]:
        chunk = self.stream_frames
        for i, part in enumerate(latents.split(self.latent(chunk, 1, 1)[1], dim=2)):
            yield self.decode_chunk(part, min(chunk, num_frames - i * chunk))


def build_autoencoder(config: AutoencoderSection, dtype: torch.dtype = torch.float32) -> Autoencoder:
    """Return the autoencoder that `ae` describes; a learned one on the meta device, of `dtype`, to be filled with
    weights."""
    return resolve_name(type(config).AUTOENCODER)(config, dtype)
