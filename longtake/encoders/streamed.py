"""Causal autoencoders that code a video part by part and carry a cache of earlier frames from part to part."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from longtake.encoders.kl import TiledAutoencoder
from longtake.encoders.tiles import Tiling
from longtake.parallel.shared_work import Tile


class StreamedAutoencoder(TiledAutoencoder):
    """4k+1 frames -> k+1 latent frames, any number of them; `mini_batch` samples at once.

    In tiles each tile has all frames: the caches of all tiles at once would take more than the frames do.
    """

    def _tilings(self) -> tuple[Tiling, Tiling]:
        sides, strides = self.config.tile_sides, self.config.tile_strides
        pixels, cells = (
            Tiling(
                None,
                1,
                (sides[0] // cell, sides[1] // cell) if self.config.use_tiling else None,
                (strides[0] // cell, strides[1] // cell),
            )
            for cell in (1, self.latent.spatial)
        )
        return pixels, cells

    def _samples_at_once(self, shape: tuple[int, int, int]) -> tuple[int, int]:
        return self.config.mini_batch, self.config.mini_batch

    def stream_lengths(self, num_frames: int) -> list[int]:
        """Chunks that take a few parts of the encoder each."""
        return super().stream_lengths(num_frames) if self.config.use_tiling else self._chunk_lengths(num_frames)

    @torch.no_grad()
    def posterior_of_stream(self, video: Iterable[Tensor]) -> Iterator[dict[str, Tensor]]:
        if self.config.use_tiling:
            yield from super().posterior_of_stream(video)
            return
        caches: dict[int, Any] = {}  # of this rank's groups, where ranks share them

        def run(place: int, group: Tensor) -> Tensor:
            moments, caches[place] = self._encode_part(group, caches.get(place))
            return moments

        for chunk in video:
            groups = enumerate(chunk.split(self.config.mini_batch))  # from chunk to chunk, each has the same rank
            tiles = [Tile(partial(run, place, group), self._encoded(tuple(group.shape))) for place, group in groups]
            yield self._as_posterior(torch.cat(self.compute(tiles)))

    @torch.no_grad()
    def decode_stream(self, latents: Tensor, num_frames: int) -> Iterator[Tensor]:
        if self.config.use_tiling:
            yield from super().decode_stream(latents, num_frames)
            return
        self.load_decoder()
        made, z = 0, self._unscaled(latents)
        groups = [
            (self._as_pixels(tuple(group.shape)), self._decoded_parts(group))
            for group in z.split(self.config.mini_batch)
        ]
        for span in self._decoded_spans(z.shape[2]):
            frames = self.latent.temporal * (span.stop - span.start - 1) + 1
            frames += (span.start > 0) * (self.latent.temporal - 1)
            tiles = [Tile(partial(next, parts), (*shape[:2], frames, *shape[3:])) for shape, parts in groups]
            pixels = self._unfolded(torch.cat(self.compute(tiles)))[:, :, : num_frames - made].float().clamp(-1, 1)
            made += pixels.shape[2]
            yield pixels

    def _decoded(self, z: Tensor) -> Tensor:
        return self._unfolded(super()._decoded(z))

    def _encode_tile(self, tile: Tensor) -> Tensor:
        return self._encode_part(tile, None)[0]

    def _decode_tile(self, tile: Tensor) -> Tensor:
        return torch.cat(list(self._decoded_parts(tile)), dim=2)

    def _unfolded(self, decoded: Tensor) -> Tensor:
        """Pixels of what the decoder gives."""
        return decoded

    @abstractmethod
    def _chunk_lengths(self, num_frames: int) -> list[int]:
        """`stream_lengths` of whole frames."""

    @abstractmethod
    def _encode_part(self, video: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """Moments of the next frames of a video; cache: of those before, None at its beginning."""

    @abstractmethod
    def _decoded_parts(self, tile: Tensor) -> Iterator[Tensor]:
        """Return the decoder's output for unscaled latents, span by span."""

    @abstractmethod
    def _decoded_spans(self, num_latents: int) -> Iterator[slice]:
        """Latent frames that are decoded together, in order."""
