"""Given frames of Open-Sora 1.2: masks of training and mask strategies, against what that program computed."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from longtake.contracts import LatentShape, UserError
from longtake.diffusion.known import Refs
from longtake.families.opensora_v1_2_kinds import KIND_PATTERN, NOTHING
from longtake.families.opensora_v1_2_known import FrameMasks
from longtake.families.opensora_v1_2_masks import to_make
from longtake.families.opensora_v1_2_strategy import (
    PATTERN,
    MaskGroup,
    carried,
    nearest,
    of_clip,
    placed,
    ratios,
    read_strategy,
)
from tests.buckets.tables import golden
from tests.precision import within

V1_2 = "opensora_v1_2"
MASKS = golden("masks.json", V1_2)
STRATEGIES = golden("mask_strategy.json", V1_2)
LATENT = LatentShape(4, 4, 8, causal=True, chunk=17, whole_cells=True)
OUR_NAME = {"intepolate": "interpolate"}


class Theirs:
    """Python's numbers, and for single frames torch's, as there."""

    def __init__(self, frames: int) -> None:
        self.frames, self.shares = frames, 0

    def integer(self, low: int, high: int) -> int:
        return random.randint(low, high - 1)

    def share(self) -> float:
        self.shares += 1
        if self.shares == 1:
            return random.random()
        if self.shares == 2:
            self.drawn = torch.rand(self.frames).tolist()
        return self.drawn[self.shares - 2]


@pytest.mark.parametrize("kind", MASKS["single"])
def test_masks_are_those_of_open_sora_1_2(kind: str) -> None:
    for frames, found in MASKS["single"][kind].items():
        if found[0] == "ValueError" or "1" not in found[0]:  # what it cannot draw, and a clip without a frame to make
            assert to_make(kind, Theirs(int(frames)), int(frames)).any()
            continue
        for seed, mask in enumerate(found, MASKS["first_seed"]):
            random.seed(seed)
            torch.manual_seed(seed)
            random.random()  # the kind
            own = to_make(OUR_NAME.get(kind, kind), Theirs(int(frames)), int(frames))
            assert "".join("01"[one] for one in own.tolist()) == mask, (frames, seed)


@pytest.mark.parametrize("name", ["train/stage1", "train/stage2", "train/stage3", "train/adapt", "lambda/stage4"])
def test_kinds_are_drawn_as_often_as_there(name: str) -> None:
    golden_set = MASKS["sets"][name]
    weights = {OUR_NAME.get(kind, kind): ratio for kind, ratio, _ in golden_set["order_ratio_cumulative"]}
    draws = 4000
    numbers = np.random.default_rng(0).random((draws, 3))
    seen: Counter[str] = Counter()
    for places in FrameMasks().drawn({"mask": numbers}, weights, LATENT, (51, 64, 64)):
        kept = [1.0] * 15 if places.released is None else places.released.flatten().tolist()
        seen["".join("01"[int(one)] for one in kept)] += 1
    for mask, count in golden_set["most_common"][:4]:
        share = count / golden_set["draws"]
        assert within(abs(seen[mask] / draws - share), 5 * (share * (1 - share) / draws) ** 0.5 + 1e-9), mask


def test_strategies_are_read_as_there() -> None:
    for text, expected in STRATEGIES["parse"].items():
        if isinstance(expected, str) and text != "0,,0":  # an empty reference is the clip before
            with pytest.raises(UserError, match="write up to six numbers"):
                read_strategy(text)
        elif not isinstance(expected, str):
            found = [(g.clip, g.reference, g.start, g.target, g.length, g.edit_ratio) for g in read_strategy(text)]
            assert found == [tuple(group) for group in expected]
    assert [nearest(value, step, most) for value, step, most, _ in STRATEGIES["find_nearest_point"]] == [
        found for *_, found in STRATEGIES["find_nearest_point"]
    ]


@pytest.mark.parametrize("case", STRATEGIES["apply"], ids=lambda case: f"{case['frames']}-{case['strategies']}")
def test_strategies_give_the_frames_that_they_give_there(case: dict[str, Any]) -> None:
    frames = case["frames"]
    for item, (strategy, lengths) in enumerate(zip(case["strategies"], case["refs"], strict=True)):
        groups = [group for group in read_strategy(strategy) if group.clip == case.get("loop", 0)]
        if case.get("error") == "RuntimeError":
            with pytest.raises(UserError, match="choose a target from -4"):
                placed(groups[0], frames, lengths[0])
            continue
        if "error" in case or groups == [MaskGroup(start=-5, length=2)]:  # a missing file; counted from the end twice
            continue
        found = [placed(group, frames, lengths[group.reference], case.get("align")) for group in groups]
        groups = [group for group in found if group is not None]
        z = [-(frame + 1) for frame in range(frames)]
        for group in groups:
            first = 1000 * (item + 1) + 100 * group.reference + group.start
            z[group.target : group.target + group.length] = range(first, first + group.length)
        assert z == case["z"][item]
        assert ratios(groups, frames) == pytest.approx(case["mask"][item])


def test_a_request_takes_the_pixels_that_become_the_latents_of_a_strategy() -> None:
    law, shape = FrameMasks(), (51, 64, 64)
    first, last = law.windows("0;0,1,0,-1,1", LATENT, 51)
    assert (first.frames, len(first.pixels), first.reference) == (range(1), 1, 0)
    assert (last.frames, len(last.pixels), last.reference, last.takes_end) == (range(14, 15), 1, 1, False)
    (tail,) = law.windows("0,0,-5,0,5", LATENT, 51)
    assert (tail.frames, len(tail.pixels), tail.takes_end, tail.skip) == (range(5), 17, True, 0)
    (later,) = law.windows("0,0,5,3,99,0.5", LATENT, 51)
    assert (later.frames, len(later.pixels), later.skip, later.takes_end) == (range(3, 15), 56, 5, False)
    released = law.given("0,0,0,0,2;0,0,0,1,2,0.5", LATENT, shape).released
    assert released.flatten()[:4].tolist() == [0, 0.5, 0.5, 1]
    assert law.given("image_head", LATENT, shape).windows == law.given("0", LATENT, shape).windows
    assert not law.given(NOTHING, LATENT, shape).windows
    assert not law.windows("image_head", LATENT, 1)


@pytest.mark.parametrize(
    ("strategy", "refs", "frames", "pixels"),
    [
        ("0,0,-5,0,5", (40,), range(5), 17),  # enough
        ("0,0,-5,0,5", (10,), range(3), 9),
        ("0,0,-5,0,2", (5,), range(2), 5),
        ("0,0,0,0,15,0.4", (40,), range(12), 39),
        ("0,1,1,3,9", (1, 17), range(3, 7), 17),
        ("extend", (1,), range(1), 1),
        ("0,0,3,0,2", (5,), range(2), 17),  # of which the reference has nothing: what it lacks is told by others
    ],
)
def test_a_reference_that_is_too_short_gives_what_it_has(
    strategy: str, refs: tuple[int, ...], frames: range, pixels: int
) -> None:
    (window,) = FrameMasks().windows(strategy, LATENT, 51, Refs(refs))
    assert (window.frames, len(window.pixels)) == (frames, pixels)
    released = FrameMasks().given(strategy, LATENT, (51, 64, 64), refs=Refs(refs)).released.flatten()
    assert len(FrameMasks().windows("extend", LATENT, 51, Refs((1,), carried=True))[0].frames) == 5
    assert [place for place, share in enumerate(released.tolist()) if share < 1] == list(frames)


def test_a_later_clip_goes_on_from_the_one_before_and_has_its_own_part_of_the_strategy() -> None:
    law = FrameMasks()
    assert of_clip("0;2,1,0,-1,1,0.25", 2) == "0,1,0,-1,1,0.25"
    assert law.continued("0;2,1,0,-1,1", "extend", 1) == "extend"
    own = law.continued("0;2,1,0,-1,1", "extend", 2)
    before, reference = law.windows(own, LATENT, 51)
    assert (before.reference, len(before.pixels), before.takes_end) == (None, 17, True)
    assert (reference.reference, reference.frames) == (1, range(14, 15))
    assert law.continued("image_head", "0,,-10,0,10,0.25", 3) == "0,,-10,0,10,0.25"
    for case in STRATEGIES["append_generated"]:
        for before, after in zip(case["strategies"], case["strategies_after"], strict=True):
            own = read_strategy(law.continued(before or NOTHING, carried(case["length"], case["edit"]), case["loop"]))
            (theirs,) = [group for group in read_strategy(after) if group.clip == case["loop"]]
            assert own == (replace(theirs, clip=0, reference=None),)  # there it is the last of the references
    for frames, pixels in STRATEGIES["dframe_to_frame"].items():
        assert pixels in ("AssertionError", LATENT.pixel_frames(int(frames)) if int(frames) else 0)
    for kind in ("extend", "0", "0,0,-5,0,5", " 0 , 1 ", "0,,-5,0,5,1e-2;1,2"):
        assert re.fullmatch(KIND_PATTERN, kind)
    for kind in ("", "i2v_head", "0;", "a", "0,0,0,0,1,0,0", "0,0,0,0,-1"):
        assert not re.fullmatch(PATTERN, kind)
