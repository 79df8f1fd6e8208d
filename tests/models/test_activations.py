"""Activations beside what a product reads with them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from longtake.models.activations import beside_gelu


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_activations_are_written_beside_to_the_bits_of_the_formula(dtype: torch.dtype) -> None:
    """Of widths that are no multiple of a vector's, and of a part of wider rows, as blocks have them."""
    x = torch.randn(2, 7, 21).to(dtype).requires_grad_()
    rows = torch.randn(2, 7, 10 + 37).to(dtype).requires_grad_()
    grad = torch.randn(2, 7, 21 + 37).to(dtype)

    def by_formula(x: Tensor, hidden: Tensor) -> Tensor:
        return torch.cat([x, F.gelu(hidden, approximate="tanh")], -1)

    found = []
    for way in (by_formula, beside_gelu, torch.compile(beside_gelu, backend="aot_eager", fullgraph=True)):
        out = way(x, rows[..., 10:])
        found.append([out, *torch.autograd.grad(out, [x, rows], grad)])
    for one in found[1:]:
        assert all(torch.equal(each, of) for each, of in zip(one, found[0], strict=True))
