"""Windows of known frames that overlap: of each sample its own later one counts."""

from __future__ import annotations

import torch
from torch import Tensor

from longtake.diffusion.known import Places, make_known
from longtake.diffusion.windows import Window


def test_overlapping_windows_of_a_batch_keep_the_order_of_each_sample() -> None:
    first, second = (Window(range(2), range(5), reference=reference) for reference in (0, 1))
    given = [Places((first, second)), Places((second, first)), Places((first, second, first))]
    calls: list[tuple[list[int], int | None]] = []

    def encode(rows: list[int], window: Window) -> Tensor:
        calls.append((rows, window.reference))
        return torch.full((len(rows), 4, 2, 1, 1), 1.0 + (window.reference or 0))

    known = make_known(given, torch.zeros(3, 4, 3, 1, 1), (9, 8, 8), encode, own=False)
    assert known.latents[:, 0, 0, 0, 0].tolist() == [2.0, 1.0, 1.0]
    assert known.latents[:, 0, 2, 0, 0].tolist() == [0.0, 0.0, 0.0]
    assert calls == [([0, 1, 2], 0), ([0, 1, 2], 1)]
