"""Text dropout: some samples train without their text, so that one model serves both branches of guidance."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from longtake.contracts import Conditions


def drop_text(
    conditions: Conditions, empty: Conditions, uniforms: Mapping[str, Tensor], ratios: Mapping[str, float]
) -> Conditions:
    """Replace the text of some samples by what stands for no text, each condition on its own.

    A sample's condition `name` goes where uniforms[name] < ratios[name]; uniforms: condition -> float32 [B] in [0, 1).
    empty: conditions of one row, or of B, of the shapes that those of the samples have. Where it has a mask, the mask
    goes with the text; where it has none, the sample's own mask stays. A condition that is not there stays away.
    """
    for name, ratio in ratios.items():
        if ratio == 0.0 or name not in conditions:
            continue
        values = conditions[name]
        drop = (uniforms[name] < ratio).to(values.device)
        nothing = _where(drop, empty[name].to(values) if name in empty else None, values)
        masks = {name: _where(drop, empty.masks[name], conditions.masks[name])} if name in empty.masks else {}
        conditions = conditions.updated(masks, **{name: nothing})
    return conditions


def _where(rows: Tensor, value: Tensor | None, other: Tensor) -> Tensor:
    """Rows of `value` (or its only one) where `rows` [B] is True, else of `other` [B, ...]; one for all captions of a
    clip where `other` has several."""
    if value is not None and value.dim() == other.dim() - 1:
        value = value.unsqueeze(1).expand(-1, other.shape[1], *value.shape[1:])
    if value is None or value.shape[1:] != other.shape[1:]:
        found = None if value is None else tuple(value.shape[1:])
        raise ValueError(f"what stands for no text has shape {found} where the texts have {tuple(other.shape[1:])}")
    return torch.where(rows.view(-1, *[1] * (other.dim() - 1)), value, other)
