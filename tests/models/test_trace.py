"""What a trace takes for granted against what PyTorch says."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from longtake.models.law import fit
from longtake.models.trace import _known_result

ATEN = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


ROWS = meta(2, 1, 48).chunk(6, dim=-1)[1]  # with gaps
HEADS = meta(2, 5, 3, 16)
CODES = meta(4, 6, dtype=torch.uint8)
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
    (ATEN.logaddexp.default, (HEADS[..., 0], HEADS[..., 1])),
    (ATEN.mul.Tensor, (HEADS.transpose(1, 2), meta(2, 3, 5)[..., None])),
    (ATEN.mul.Tensor, (meta(2, 3, 5)[..., None], HEADS.transpose(1, 2))),
    (ATEN.eq.Tensor, (HEADS, HEADS)),
    (ATEN.add_.Tensor, (meta(4, 6), meta(6))),
    (ATEN.empty_like.default, (HEADS.transpose(1, 2),)),
    (ATEN.mm.default, (meta(4, 5), meta(7, 5).t())),
    (ATEN.bmm.default, (meta(2, 4, 5), meta(2, 7, 5).transpose(1, 2))),
    (ATEN.cat.default, ([HEADS.expand(2, 5, 3, 16), HEADS[:, :2]], -3)),
    (ATEN.cat.default, ([meta(2, 3, 8, 8).to(memory_format=torch.channels_last)] * 2, 1)),
    (ATEN.cat.default, ([meta(4), meta(4, dtype=torch.float32)],)),
    (ATEN.stack.default, ([CODES, CODES], -1)),
    (ATEN.bitwise_and.Scalar, (CODES, 15)),
    (ATEN.__rshift__.Scalar, (CODES, 4)),
    (ATEN.index.Tensor, (meta(16), [CODES.long()])),
    (ATEN.arange.start_step, (1, 8, 3)),
    (ATEN.mean.default, (HEADS,)),
    (ATEN.sum.default, (HEADS,)),
    (ATEN.gt.Scalar, (meta(4, 1), 0)),
    (ATEN.gt.Scalar, (ROWS, 0)),
    (ATEN.where.self, (meta(2, 1, 1, 1, dtype=torch.bool), HEADS, meta())),
    (ATEN.where.self, (meta(2, 1, 1, 1, dtype=torch.bool), meta(1, 5, 3, 16), meta())),
    (ATEN.where.self, (meta(2, 5, 1, 1, dtype=torch.bool), HEADS.transpose(1, 2).transpose(1, 2), meta())),
    (ATEN.mean.dim, (HEADS, [-1, 0])),
    (ATEN.slice_backward.default, (meta(2, 5), [2, 9], 1, 0, 5, 1)),
    (ATEN._scaled_dot_product_flash_attention.default, (HEADS.transpose(1, 2), *[meta(2, 3, 7, 16)] * 2)),
    (ATEN.gelu_backward.default, (meta(2, 8, 6).transpose(1, 2), meta(2, 6, 8))),
]


@pytest.mark.parametrize(("operation", "args"), CASES)
def test_a_result_that_is_plain_to_see_is_what_pytorch_gives(operation: Any, args: tuple[Any, ...]) -> None:
    options = {"device": "meta"} if operation is ATEN.arange.start_step else {}
    seen, real = _known_result(operation, args, options), operation(*args, **options)
    if seen is not None:
        for one, other in zip(tree_leaves(seen), tree_leaves(real), strict=True):
            assert one == other if not isinstance(one, Tensor) else facts(one) == facts(other)


def test_most_of_these_are_seen() -> None:
    assert sum(_known_result(*case, {}) is not None for case in CASES) >= 34


def facts(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype


HAS_KERNEL = torch._C._dispatch_has_kernel_for_dispatch_key
OTHERS = {"copysign", "logit_backward", "conj_physical", "mvlgamma"}  # otherwise on the meta device than on a GPU


def test_every_operation_on_each_number_gives_what_is_taken_to_be_plain() -> None:
    checked = 0
    layouts = (HEADS, HEADS.transpose(1, 2), HEADS.float(), meta(5, 1, 16), HEADS[:, :, :1].expand(2, 5, 3, 16))
    for operation in operations_on_each_number():
        taken = [str(one.type) for one in operation._schema.arguments if not one.has_default_value()]
        if set(taken) - {"Tensor"} or operation._schema.is_mutable:
            continue
        for args in product(layouts, repeat=min(len(taken), 2)):
            args += (args[0],) * (len(taken) - 2)
            try:
                real = operation(*args)
            except (RuntimeError, ValueError):
                continue
            if (seen := _known_result(operation, args, {})) is not None:
                assert facts(seen) == facts(real), (operation, args)
                checked += 1
    assert checked > 500


def operations_on_each_number() -> Iterator[Any]:
    """Those that a trace can see: others are taken apart before."""
    for name in torch._C._dispatch_get_all_op_names():
        short, _, kind = name.removeprefix("aten::").partition(".")
        if name.startswith("aten::") and not HAS_KERNEL(name, "CompositeImplicitAutograd") and short not in OTHERS:
            operation = getattr(getattr(ATEN, short), kind or "default")
            if torch.Tag.pointwise in operation.tags:
                yield operation


def test_a_law_finds_the_terms_that_made_the_numbers_and_says_when_others_are_not_its_own() -> None:
    points = [(1, 2), (2, 2), (3, 5), (4, 1), (7, 3)]

    def measure(sizes: tuple[int, ...]) -> dict[str, Any]:
        a, b = sizes
        return {"one": 3e6 * a * b + 5e5, "many": [1e9 * b, 2e7 * a * b]}

    law = fit(points, measure, lambda sizes: (sizes[0] * sizes[1], sizes[1], 1, sizes[0]))
    said = law((100, 50))
    assert said["one"] == pytest.approx(measure((100, 50))["one"], rel=1e-9)
    assert said["many"] == pytest.approx(measure((100, 50))["many"], rel=1e-9)
    assert law.predicts((100, 50), measure((100, 50)))
    assert not law.predicts((100, 50), {"one": 1.6e10, "many": [5e10, 1e11]})
    assert not law.predicts((100, 50), {"one": 1.5e10, "many": [5e10]})
