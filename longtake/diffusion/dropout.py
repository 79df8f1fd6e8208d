"""Text dropout: some samples train without their text, so that one model serves both branches of guidance."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from longtake.contracts import Conditions


def drop_text(conditions: Conditions, empty: Conditions, uniforms: Tensor, ratios: tuple[float, float]) -> Conditions:
    """Replaces the text of some samples by that of the empty prompt.

    The token sequence goes where uniforms[:, 0] < ratios[0], the pooled vector where uniforms[:, 1] < ratios[1],
    independently. uniforms: float32 [B, 2] in [0, 1). empty: text [1, L, Dt] and vector [1, Dv] (or with B rows), of
    the shapes the conditions have. A condition that is None stays None.
    """
    return replace(
        conditions,
        text=_replace_rows(conditions.text, empty.text, uniforms[:, 0], ratios[0]),
        vector=_replace_rows(conditions.vector, empty.vector, uniforms[:, 1], ratios[1]),
    )


def _replace_rows(values: Tensor | None, empty: Tensor | None, uniforms: Tensor, ratio: float) -> Tensor | None:
    if values is None or ratio == 0.0:
        return values
    if empty is None or empty.shape[1:] != values.shape[1:]:
        found = None if empty is None else tuple(empty.shape[1:])
        raise ValueError(f"the empty prompt has shape {found} where the texts have {tuple(values.shape[1:])}")
    drop = (uniforms < ratio).to(values.device).view(-1, *[1] * (values.dim() - 1))
    return torch.where(drop, empty.to(values), values)
