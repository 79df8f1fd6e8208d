"""Memory layouts of an autoencoder's convolutions, for programs that compare them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

LAYOUTS = {"contiguous": {}, "channels_last": {4: torch.channels_last, 5: torch.channels_last_3d}}


def lay_out_weights(modules: Iterable[nn.Module], layout: str) -> None:
    """Store the weights of convolutions in one of `LAYOUTS`; their outputs then have it too."""
    for parameter in (p for module in modules for p in module.parameters() if p.dim() in (4, 5)):
        form = LAYOUTS[layout].get(parameter.dim(), torch.contiguous_format)
        parameter.data = parameter.data.contiguous(memory_format=form)
