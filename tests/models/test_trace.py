"""What a trace takes for granted against what PyTorch says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longtake.models.trace import _known_result, fit

ATEN = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


ROWS = meta(2, 1, 48).chunk(6, dim=-1)[1]  # with gaps
HEADS = meta(2, 5, 3, 16)
CASES: list[tuple[Any, tuple[Any, ...]]] = [
    (ATEN.addmm.default, (meta(7), meta(4, 5), meta(7, 5).t())),
    (ATEN.addmm.default, (meta(7), meta(5, 4).t(), meta(5, 7))),
    (ATEN.sum.dim_IntList, (HEADS, [0, 2], True)),
    (ATEN.sum.dim_IntList, (HEADS, [-1], False)),
    (ATEN.sum.dim_IntList, (HEADS.transpose(1, 2), [1], True)),
    (ATEN.mul.Tensor, (meta(2, 6, 8), ROWS)),
    (ATEN.mul.Tensor, (ROWS, meta(6, 2, 8).transpose(0, 1))),
    (ATEN.mul.Tensor, (HEADS[..., :4], meta(5, 1, 4))),
    (ATEN.mul.Tensor, (HEADS.transpose(1, 2), HEADS.transpose(1, 2))),
    (ATEN.mul.Tensor, (HEADS.expand(2, 5, 3, 16), HEADS[:, :, :1].expand(2, 5, 3, 16))),
    (ATEN.mul.Tensor, (meta(4), torch.tensor(2.0))),
    (ATEN.mul.Tensor, (meta(4), meta(4, dtype=torch.float32))),
    (ATEN.mul.Scalar, (ROWS, 2.5)),
    (ATEN.mul.Scalar, (meta(4, dtype=torch.int64), 2.5)),
    (ATEN.add.Tensor, (ROWS, 1)),
    (ATEN.sub.Tensor, (meta(3, 1), meta(1, 4))),
    (ATEN.neg.default, (HEADS.permute(3, 2, 1, 0),)),
    (ATEN.addcmul.default, (ROWS, meta(2, 6, 8), meta(2, 1, 8))),
    (ATEN.gelu.default, (meta(2, 6, 8)[:, ::2],)),
    (ATEN.gelu_backward.default, (meta(2, 8, 6).transpose(1, 2), meta(2, 6, 8))),
]


@pytest.mark.parametrize(("operation", "args"), CASES)
def test_a_result_that_is_plain_to_see_is_what_pytorch_gives(operation: Any, args: tuple[Any, ...]) -> None:
    seen, real = _known_result(operation, args), operation(*args)
    if seen is not None:
        assert (seen.shape, seen.stride(), seen.dtype) == (real.shape, real.stride(), real.dtype)


def test_most_of_these_are_seen() -> None:
    assert sum(_known_result(*case) is not None for case in CASES) >= 11


def test_a_law_finds_the_terms_that_made_the_numbers_and_says_when_others_are_not_its_own() -> None:
    points = [(1, 2), (2, 2), (3, 5), (4, 1), (7, 3)]

    def measure(sizes: tuple[int, ...]) -> dict[str, Any]:
        a, b = sizes
        return {"one": 3e6 * a * b + 5e5, "many": [1e9 * b, 2e7 * a * b]}

    law = fit(points, measure, lambda sizes: (sizes[0] * sizes[1], sizes[1], 1, sizes[0]))
    said = law((100, 50))
    assert said["one"] == pytest.approx(measure((100, 50))["one"], rel=1e-9)
    assert said["many"] == pytest.approx(measure((100, 50))["many"], rel=1e-9)
    assert law.foretells((100, 50), measure((100, 50)))
    assert not law.foretells((100, 50), {"one": 1.6e10, "many": [5e10, 1e11]})
    assert not law.foretells((100, 50), {"one": 1.5e10, "many": [5e10]})
