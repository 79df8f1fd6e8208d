"""What Open-Sora 1.2 knows of clips: frames of their own in training, and frames of references by mask strategies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from longtake.contracts import Known, LatentShape, UserError
from longtake.diffusion.known import NOTHING_KNOWN, ONE_REF, ByKind, PixelShape, Places, Refs, Window
from longtake.families.opensora_v1_2_kinds import KINDS, NOTHING, STRATEGIES
from longtake.families.opensora_v1_2_masks import MASKS, to_make
from longtake.families.opensora_v1_2_strategy import MaskGroup, of_clip, placed, ratios, read_strategy
from longtake.random import OwnNumbers

if TYPE_CHECKING:
    from torch import Tensor


class FrameMasks(ByKind):
    """The law of given frames: in training a mask of latent frames, taken from the clip's own; in generation a mask
    strategy, or a kind that stands for one. A draw's numbers: of the kind, and two that the mask follows from."""

    kinds = KINDS
    numbers = 2

    def windows(self, kind: str, latent: LatentShape, num_frames: int, refs: Refs = ONE_REF) -> tuple[Window, ...]:
        """What a kind or a strategy takes of references."""
        frames = latent(num_frames, 1, 1)[1]
        if kind == NOTHING or frames == 1:
            return ()
        if kind in MASKS and kind not in STRATEGIES:
            return (Window(range(frames), range(num_frames)),)
        return tuple(_window(group, latent) for group in _groups(kind, frames, latent, refs))

    def places(
        self, kind: str, latent: LatentShape, shape: PixelShape, mask: Tensor | None, numbers: Sequence[float]
    ) -> Places:
        """What a kind makes known of a training clip."""
        frames = latent(*shape)[1]
        if kind not in MASKS:
            return NOTHING_KNOWN
        return _masked(kind, OwnNumbers(*(int(u * 2**24) for u in numbers)), frames, shape[0])

    def given(
        self, kind: str, latent: LatentShape, shape: PixelShape, mask: Tensor | None = None, refs: Refs = ONE_REF
    ) -> Places:
        windows, frames = self.windows(kind, latent, shape[0], refs), latent(*shape)[1]
        if not windows:
            return NOTHING_KNOWN
        if kind in MASKS and kind not in STRATEGIES:
            return _masked(kind, OwnNumbers(0, 0), frames, shape[0])
        return Places(windows, _released(ratios(_groups(kind, frames, latent, refs), frames)))

    def continued(self, kind: str, carries: str, clip: int) -> str:
        """What a later clip knows: the clip before, and what the strategy of the video says of this one."""
        own = of_clip(STRATEGIES.get(kind, kind), clip) if kind not in MASKS and kind != NOTHING else ""
        return f"{STRATEGIES.get(carries, carries)};{own}" if own else carries

    def conditions(self, known: Known) -> Mapping[str, Tensor]:
        """None: `x_mask` tells of the frames."""
        return {}


def _groups(kind: str, frames: int, latent: LatentShape, refs: Refs) -> list[MaskGroup]:
    """What a strategy says of a clip by itself, the places counted from its beginning. Raises `UserError` for a group
    outside it."""
    groups = read_strategy(STRATEGIES.get(kind, kind))
    return [_fitted(group, frames, latent, refs) for group in groups if group.clip == 0]


def _fitted(group: MaskGroup, frames: int, latent: LatentShape, refs: Refs) -> MaskGroup:
    """Return a group as it is placed, cut to what its reference has; of one that has none of it, uncut."""
    if (found := placed(group, frames)) is None:
        raise UserError(
            f'mask strategy "{group}": is about no frame of a clip with {frames} latent frames; choose a target from '
            f"{-frames} to {frames - 1} and a length from 1"
        )
    number = group.reference or 0
    carried = group.reference is None and refs.carried
    if carried or number >= len(refs.frames) or (has := refs.frames[number]) == math.inf:
        return found
    whole = latent(int(has), 1, 1)[1]
    whole -= latent.pixel_frames(whole) > has
    return found if max(-found.start, found.start + found.length) <= whole else placed(group, frames, whole) or found


def _window(group: MaskGroup, latent: LatentShape) -> Window:
    """Return the frames of a reference that become the latents of a group."""
    count = latent.pixel_frames(group.start + group.length if group.start >= 0 else -group.start)
    first = latent.pixel_frames(group.target) if group.target else 0
    return Window(
        range(group.target, group.target + group.length),
        range(first, first + count),
        skip=max(group.start, 0),
        reference=group.reference,
        from_end=group.start < 0,
    )


def _masked(kind: str, numbers: OwnNumbers, frames: int, num_frames: int) -> Places:
    mask = to_make(kind, numbers, frames)
    if mask.all():
        return NOTHING_KNOWN
    return Places((Window(range(frames), range(num_frames)),), _released(mask.astype(np.float32).tolist()))


def _released(shares: Sequence[float]) -> Tensor:
    """[F] -> float32 [1, F, 1, 1]."""
    import torch

    return torch.tensor(shares, dtype=torch.float32)[None, :, None, None]
