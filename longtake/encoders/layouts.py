"""The memory layout of an autoencoder's convolutions: whichever is faster on a GPU at a run's own shape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from longtake.encoders.autoencoder import Autoencoder
from longtake.models.failures import Report
from longtake.models.timing import time_each

LAYOUTS = {"contiguous": {}, "channels_last": {4: torch.channels_last, 5: torch.channels_last_3d}}
_FRAMES = 33  # of a video that is timed, at most
Take = Callable[[Callable[[], Mapping[str, Any]]], Mapping[str, Any]]


def lay_out_weights(modules: Iterable[nn.Module], layout: str) -> None:
    """Lays weights of convolutions in one of `LAYOUTS`, which what they compute then has too; results stay the same
    but for rounding."""
    for parameter in (p for module in modules for p in module.parameters() if p.dim() in (4, 5)):
        form = LAYOUTS[layout].get(parameter.dim(), torch.contiguous_format)
        parameter.data = parameter.data.contiguous(memory_format=form)


def choose_layout(
    autoencoder: Autoencoder,
    shape: tuple[int, int, int],
    device: torch.device,
    take: Take,
    report: Report,
    decodes: bool = False,
) -> str | None:
    """On CUDA, lays out the weights that encode or decode videos of (T, H, W) pixels in the layout that is faster;
    returns a line on it. None where nothing is timed: weights that come from the host each time, and compiled layers,
    stay as they are. `take`: gives every rank what the first one finds. `report` is called for layouts that fail.
    Collective."""
    parts, config = autoencoder.decoding if decodes else autoencoder.encoding, autoencoder.config
    moved, compiled = getattr(config, "placement", None) == "offloaded", getattr(config, "compile", False)
    if device.type != "cuda" or not parts or moved or compiled:
        return None
    if decodes:
        autoencoder.load_decoder()
    frames, *sides = autoencoder.piece(shape)
    piece = min(_FRAMES, frames), *sides
    found = take(lambda: {"seconds": time_layouts(autoencoder, piece, device, decodes, report)})["seconds"]
    chosen = min(found, key=found.__getitem__, default="contiguous")
    lay_out_weights(parts.values(), chosen)
    figures = ", ".join(f"{name} {1e3 * seconds:.1f} ms" for name, seconds in found.items())
    size = " x ".join(map(str, piece))
    return f"autoencoder, {'decoding' if decodes else 'encoding'}: {chosen} in memory ({size} pixels: {figures})"


@torch.no_grad()
def time_layouts(
    autoencoder: Autoencoder, shape: tuple[int, int, int], device: torch.device, decodes: bool, report: Report
) -> dict[str, float]:
    """Seconds of encoding or decoding a video of (T, H, W) pixels on this rank alone in each layout that runs; `report`
    is called for those that fail."""
    parts, compute = autoencoder.decoding if decodes else autoencoder.encoding, autoencoder.compute
    x = torch.zeros(1, *(autoencoder.latent(*shape) if decodes else (3, *shape)), device=device)

    def run() -> None:
        if decodes:
            autoencoder.decode(x, shape[0])
        else:
            autoencoder.posterior(x)

    found: dict[str, float] = {}
    autoencoder.compute = lambda tiles: [tile.run() for tile in tiles]
    try:
        for layout in LAYOUTS:
            lay_out_weights(parts.values(), layout)
            found |= time_each({layout: run}, device, report)
    finally:
        autoencoder.compute = compute
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found
