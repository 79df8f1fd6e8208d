"""Shared layers against golden tables and closed forms."""

from __future__ import annotations

import pytest
import torch

from longtake.models.layers import (
    RMSNorm,
    RotaryPositions,
    join_positions,
    modulate,
    patchify,
    rotate_half,
    rotate_interleaved,
    timestep_features,
    token_grid,
    unpatchify,
)
from tests.models.golden import read_golden
from tests.precision import within


def test_timestep_features_equal_the_reference() -> None:
    """Up to a unit in the last place of the frequencies, by which processors round `exp` differently."""
    _, parts = read_golden("mmdit_parts")
    error = (timestep_features(parts["time.t"]) - parts["time.embedding"]).abs()
    angle = 1000 * parts["time.t"][:, None]  # at the largest frequency
    assert within(error, 1e-6 + 2**-23 * angle)


def test_timestep_features_of_bf16_times_show_the_references_rounding() -> None:
    _, parts = read_golden("mmdit_parts")
    found = timestep_features(parts["time.t"].bfloat16()).bfloat16()
    torch.testing.assert_close(found, parts["time.embedding_bf16"], atol=1e-2, rtol=0)


def golden_tables() -> torch.Tensor:
    """Our tables [2, S, 1, K/2] for the golden ids: three text tokens, then a video grid."""
    info, parts = read_golden("mmdit_parts")
    ids = parts["rope.ids"][0]
    text_tokens = 3
    grid = [int(n) + 1 for n in ids[text_tokens:].max(0).values]
    positions = RotaryPositions(info["axes_dim"], info["theta"])
    assert len(ids) == text_tokens + grid[0] * grid[1] * grid[2]
    return join_positions(text_tokens, positions(grid, ids.device))


def test_rotary_tables_equal_the_reference_in_both_layouts() -> None:
    _, parts = read_golden("mmdit_parts")
    cos, sin = golden_tables().squeeze(2)
    matrix = parts["rope.interleaved.table"][0, 0]
    torch.testing.assert_close(cos, matrix[..., 0, 0], atol=1e-5, rtol=0)
    torch.testing.assert_close(sin, matrix[..., 1, 0], atol=1e-5, rtol=0)
    torch.testing.assert_close(cos.repeat(1, 2), parts["rope.half.cos"][0], atol=1e-5, rtol=0)
    torch.testing.assert_close(sin.repeat(1, 2), parts["rope.half.sin"][0], atol=1e-5, rtol=0)


@pytest.mark.parametrize(("layout", "rotate"), [("half", rotate_half), ("interleaved", rotate_interleaved)])
@pytest.mark.parametrize("name", ["q", "k"])
def test_rotation_equals_the_reference(layout: str, rotate, name: str) -> None:
    _, parts = read_golden("mmdit_parts")
    x = parts[f"rope.{name}"].transpose(1, 2)  # [B, S, N, K]
    found = rotate(x, golden_tables()).transpose(1, 2)
    torch.testing.assert_close(found, parts[f"rope.{layout}.{name}"], atol=1e-5, rtol=0)


def test_rotary_tables_are_exact_far_out_and_do_not_depend_on_what_was_asked_before() -> None:
    positions = RotaryPositions((2, 4, 6), 10000.0)
    first = positions((3, 2, 2), torch.device("cpu")).clone()
    far = positions((1, 1, 5000), torch.device("cpu"))
    torch.testing.assert_close(positions((3, 2, 2), torch.device("cpu")), first, atol=0, rtol=0)
    angles = 4999 * 10000.0 ** (-torch.arange(0, 6, 2, dtype=torch.float64) / 6)
    torch.testing.assert_close(far[0, 4999, 3:], angles.cos().float(), atol=1e-6, rtol=0)
    assert torch.equal(far[1, 4999, :3], torch.zeros(3))


def test_the_store_of_tables_stays_small_over_many_shapes() -> None:
    positions = RotaryPositions((2, 4, 6), 10000.0)
    for frames in range(1, 40):
        positions((frames, 5, frames), torch.device("cpu"))
    assert len(positions._axis_tables) == 3
    assert sum(table.numel() for table in positions._axis_tables.values()) < 2000
    assert not list(positions.parameters())
    assert not positions.state_dict()


@pytest.mark.parametrize("case", range(5))
def test_patches_equal_the_reference_and_come_back(case: int) -> None:
    info, tensors = read_golden("layout")
    patch = info["cases"][str(case)]["patch_size"]
    latent = tensors[f"{case}.latent"]
    packed = patchify(latent, patch)
    assert torch.equal(packed, tensors[f"{case}.packed"])
    assert torch.equal(unpatchify(packed, latent.shape[2:], patch), latent)


@pytest.mark.parametrize("case", range(5))
def test_tokens_lie_at_the_references_positions(case: int) -> None:
    info, tensors = read_golden("layout")
    grid = token_grid(tensors[f"{case}.latent"].shape[2:], info["cases"][str(case)]["patch_size"])
    ids = tensors[f"{case}.img_ids"][0]
    cos = RotaryPositions((2, 2, 2), 10000.0)(grid, ids.device)[0]
    torch.testing.assert_close(cos, ids.cos(), atol=1e-6, rtol=0)  # one channel an axis, frequency 1


@pytest.mark.parametrize("patch", [1, 2, 3])
@pytest.mark.parametrize("size", [(1, 1, 1), (2, 5, 7), (3, 6, 4)])
def test_patches_of_odd_sizes_come_back_whole(size: tuple[int, int, int], patch: int) -> None:
    x = torch.randn(2, 3, *size)
    tokens = patchify(x, patch)
    frames, rows, columns = token_grid(size, patch)
    assert tokens.shape == (2, frames * rows * columns, 3 * patch * patch)
    found = unpatchify(tokens, size, patch)
    assert torch.equal(found, x)
    assert found.is_contiguous()
    assert not found._is_view()


def test_patchify_reads_tensors_that_are_not_contiguous() -> None:
    x = torch.randn(4, 6, 2, 1, 3).permute(3, 4, 2, 0, 1)
    assert torch.equal(patchify(x, 2), patchify(x.contiguous(), 2))


def test_norms_are_their_formulas() -> None:
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    norm = RMSNorm(8).double()
    torch.nn.init.uniform_(norm.scale)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.scale
    torch.testing.assert_close(norm(x), expected)
    shift, scale = torch.randn(2, 1, 8).double(), torch.randn(2, 1, 8).double()
    centred = x - x.mean(-1, keepdim=True)
    expected = (1 + scale) * centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt() + shift
    torch.testing.assert_close(modulate(x, shift, scale), expected)
