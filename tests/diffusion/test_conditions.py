"""Known frames: every kind as the reference makes it, drawn by weight, and no clip changes anything for the next."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from longtake.contracts import Conditions, Known, LatentShape, Noised
from longtake.diffusion.known import Encode, PixelShape, Window, keep_known, make_known, read_known
from longtake.diffusion.objective import micro_batch_loss, sample_loss
from longtake.diffusion.windows import EndWindows
from longtake.system.examples import windows_apart
from tests.diffusion.golden import read_tensors

LAW = EndWindows()
KINDS = tuple(LAW.kinds)
GOLDEN, INFO = read_tensors("train_conditions")
CAUSAL, OTHER = (LatentShape(INFO["channels"], INFO["temporal"], INFO["spatial"], causal) for causal in (True, False))


def stand_in_encode(video: Tensor, causal: bool) -> Tensor:
    """The autoencoder of the golden data: means of blocks, channels of them, and the mean of all of the video."""
    b, _, frames, height, width = video.shape
    sizes = [1] + [4] * ((frames - 1) // 4) if causal else [4] * (frames // 4) or [1]
    groups = torch.stack([part.mean(2) for part in video.split(sizes, 2)], 2)
    s = INFO["spatial"]
    blocks = groups.reshape(b, 3, len(sizes), height // s, s, width // s, s).mean((4, 6))
    whole = video.mean((1, 2, 3, 4))[:, None, None, None]
    channels = [(1 + 0.5 * c) * blocks[:, c % 3] + 0.25 * whole + 0.1 * c for c in range(INFO["channels"])]
    return torch.stack(channels, 1)


def golden_video(tag: str) -> Tensor:
    case = INFO["cases"][tag]
    video = GOLDEN["video_u8"][:, :, : case["frames"]].float() / 127.5 - 1
    return video.repeat(case["batch"], 1, 1, 1, 1)


def condition_of(video: Tensor, kinds: Sequence[str], latent: LatentShape) -> Tensor:
    def encode(rows: Sequence[int], window: Window) -> Tensor:
        return stand_in_encode(video[list(rows), :, window.pixels.start : window.pixels.stop], latent.causal)

    latents = stand_in_encode(video, latent.causal)
    return visual_of(kinds, latents, latent, tuple(video.shape[2:]), encode)


def visual_of(kinds: Sequence[str], latents: Tensor, latent: LatentShape, shape: PixelShape, encode: Encode) -> Tensor:
    given = [LAW.given(kind, latent, shape) for kind in kinds]
    return LAW.conditions(make_known(given, latents, shape, encode))["visual"]


def draw_kinds(uniforms: np.ndarray, weights: dict[str, float], latent: LatentShape, frames: int) -> list[str]:
    return LAW.drawn_kinds(uniforms, weights, latent, frames)


def kind_of(mask: Tensor, latent: LatentShape, frames: int) -> str:
    """The kind whose windows are the ones of a golden mask [F]."""
    for kind in KINDS:
        expected = torch.zeros_like(mask)
        for window in LAW.windows(kind, latent, frames):
            expected[window.frames.start : window.frames.stop] = 1
        if torch.equal(expected, mask):
            return kind
    raise AssertionError(f"no kind has the mask {mask.tolist()}")


@pytest.mark.parametrize("tag", sorted(INFO["cases"]))
def test_conditions_equal_the_reference(tag: str) -> None:
    latent = CAUSAL if tag.startswith("causal") else OTHER
    video, expected = golden_video(tag), GOLDEN[f"{tag}.cond"]
    name = tag.split(".")[1]
    torch.testing.assert_close(
        stand_in_encode(video, latent.causal)[:1], GOLDEN[f"{tag}.x0"], rtol=0, atol=1e-5, msg="the stand-in is another"
    )
    if name in KINDS:
        kinds = [name]
        assert LAW.windows(name, latent, video.shape[2]) or name == "t2v"
    else:
        kinds = [kind_of(item[0, :, 0, 0], latent, video.shape[2]) for item in expected]
    torch.testing.assert_close(condition_of(video, kinds, latent), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("tag", [tag for tag in INFO["cases"] if ".short" in tag])
def test_the_kinds_a_short_clip_may_have_are_the_references(tag: str) -> None:
    latent = CAUSAL if tag.startswith("causal") else OTHER
    case = INFO["cases"][tag]
    config = case["condition_config"]
    drawn = set(draw_kinds(np.linspace(0, 1, 200, endpoint=False), config, latent, case["frames"]))
    assert drawn == set(case["condition_config_after"])


def test_a_short_clip_changes_nothing_for_the_next_one() -> None:
    config = {"v2v_head": 1, "t2v": 1}
    uniforms = np.array([0.9], np.float32)
    before = draw_kinds(uniforms, config, CAUSAL, 77)
    assert draw_kinds(uniforms, config, CAUSAL, 33) == ["t2v"]
    assert draw_kinds(uniforms, config, CAUSAL, 77) == before == ["v2v_head"]


def test_kinds_are_drawn_by_their_weights() -> None:
    config = {"t2v": 1, "i2v_head": 5, "i2v_loop": 1, "i2v_tail": 1}  # drawn in the law's order
    uniforms = ((np.arange(8000) + 0.5) / 8000).astype(np.float32)
    drawn = draw_kinds(uniforms, config, CAUSAL, 5)
    assert {kind: drawn.count(kind) for kind in set(drawn)} == {
        "t2v": 1000,
        "i2v_head": 5000,
        "i2v_tail": 1000,
        "i2v_loop": 1000,
    }
    assert draw_kinds(np.array([np.nextafter(np.float32(1), np.float32(0))]), config, CAUSAL, 5) == ["i2v_loop"]


@pytest.mark.parametrize(("latent", "frames"), [(CAUSAL, 1), (OTHER, 1), (OTHER, 4)])
def test_what_has_one_latent_frame_knows_nothing(latent: LatentShape, frames: int) -> None:
    assert draw_kinds(np.array([0.5]), {"i2v_head": 1}, latent, frames) == ["t2v"]
    assert not any(LAW.windows(kind, latent, frames) for kind in KINDS)


def test_a_clip_too_short_for_every_kind_knows_nothing() -> None:
    assert draw_kinds(np.array([0.0, 0.9]), {"v2v_tail_easy": 2}, CAUSAL, 65) == ["t2v", "t2v"]


def test_samples_with_one_window_are_encoded_together_and_no_other_frame_is_seen() -> None:
    calls = []

    def encode(rows: Sequence[int], window: Window) -> Tensor:
        calls.append((list(rows), window.pixels))
        return torch.full((len(rows), 4, len(window.frames), 2, 2), 7.0)

    kinds = ["i2v_head", "t2v", "i2v_loop", "v2v_tail", "i2v_tail"]
    visual = visual_of(kinds, torch.ones(5, 4, 20, 2, 2), CAUSAL, (77, 16, 16), encode)
    assert calls == [([0, 2], range(1)), ([2, 4], range(76, 77)), ([3], range(44, 77))]
    assert visual[:, 0].sum((1, 2, 3)).tolist() == [4, 0, 8, 36, 4]
    assert torch.equal(visual[:, 1:], 7.0 * visual[:, :1].expand(-1, 4, -1, -1, -1))


def test_kinds_that_take_the_clips_own_latents_need_no_pixels() -> None:
    assert [kind for kind in KINDS if not windows_apart(LAW, {kind: 1}, CAUSAL, 77)] == ["t2v"]
    assert [kind for kind in KINDS if not windows_apart(LAW, {kind: 1}, OTHER, 72)] == ["t2v", *KINDS[4:]]
    own = torch.randn(1, 4, 18, 2, 2, generator=torch.Generator().manual_seed(0))
    refused = lambda *_: pytest.fail("asked for pixels")  # noqa: E731
    visual = visual_of(["v2v_tail"], own, OTHER, (72, 16, 16), refused)
    assert torch.equal(visual[:, 1:, 10:], own[:, :, 10:])
    assert not visual[:, :, :10].any()


def test_a_filler_that_is_not_finite_is_known_by_zeros() -> None:
    nan = torch.full((2, 4, 2, 2, 2), float("nan"))
    nan[0] = 1.0
    kept = keep_known(Known(torch.zeros(2, 1, 2, 1, 1), nan), torch.tensor([1.0, 0.0]))
    assert torch.equal(kept.latents[0], nan[0])
    assert kept.held[0].all()
    assert not kept.latents[1].any()
    assert not kept.held[1].any()


@pytest.mark.parametrize("case", ["0", "1", "2"])
def test_known_frames_are_left_out_of_the_loss_and_get_no_gradient(case: str) -> None:
    golden, info = read_tensors("losses")
    size, masked = info["cases"][case]["latent"], info["cases"][case]["masked_frames"]
    target, prediction = (golden[f"{case}.{name}"].reshape(size[0], size[2], -1, 1, 1) for name in ("target", "pred"))
    target, prediction = target.transpose(1, 2), prediction.transpose(1, 2).requires_grad_()  # [B, all values, F, 1, 1]
    known = golden[f"{case}.masks"].reshape(size[0], size[2], -1)[:, :, 0]
    assert [row.nonzero().flatten().tolist() for row in known] == masked
    released = 1 - known[:, None, :, None, None]
    ones = torch.ones(size[0])
    noised = Noised(target, ones, target, ones)

    def loss_and_frames(reader: str) -> tuple[torch.Tensor, torch.Tensor]:
        read, _ = read_known(noised, Conditions(), Known(released, target), frozenset({reader}), 1.0)
        loss = micro_batch_loss(sample_loss, prediction, read, ones, size[0])
        [gradient] = torch.autograd.grad(loss, prediction)
        return loss.detach(), gradient.abs().sum((1, 3, 4)) == 0

    loss, left_out = loss_and_frames("loss_at_ends")  # the published rule
    torch.testing.assert_close(loss, golden[f"{case}.loss_masked"], rtol=0, atol=1e-5)
    inner = known[:, 1:-1].any(1, keepdim=True)
    assert torch.equal(left_out, known.bool() & ~inner)
    loss, left_out = loss_and_frames("loss")
    assert torch.equal(left_out, known.bool())
    if not inner.any():
        torch.testing.assert_close(loss, golden[f"{case}.loss_masked"], rtol=0, atol=1e-5)


def test_a_sample_of_which_everything_is_known_adds_nothing() -> None:
    x, ones = torch.randn(2, 3, 2, 2, 2), torch.ones(2)
    counted = torch.tensor([[0.0, 0.0], [0.0, 1.0]])[:, None, :, None, None]
    loss = micro_batch_loss(sample_loss, x, Noised(x, ones, torch.zeros_like(x), ones, counted), ones, 2)
    torch.testing.assert_close(loss, x[1, :, 1].square().mean() / 2)


def test_a_mask_of_places_leaves_out_these_places_alone() -> None:
    x, ones = torch.randn(1, 3, 2, 4, 4), torch.ones(1)
    counted = torch.zeros(1, 1, 2, 4, 4)
    counted[..., 1, :2, 3] = 1
    loss = sample_loss(x, Noised(x, ones, torch.zeros_like(x), ones, counted))
    torch.testing.assert_close(loss, x[:, :, 1, :2, 3].square().mean()[None])
