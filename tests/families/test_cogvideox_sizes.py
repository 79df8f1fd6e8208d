"""The data modes of CogVideoX-Fun: the worked examples of its page, and what its code decided."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from longtake.buckets.assignment import assign, read_law
from longtake.buckets.mix import CostModel
from longtake.buckets.order import plan_pass
from longtake.buckets.protocol import Unused, keyed_draw
from longtake.contracts import Bucket, LatentShape
from longtake.data.clips.transforms import cover_size, even_window, fit_frame
from longtake.families.cogvideox_buckets import FunLaw, frames_of_tokens, fun_law, scale_downs, token_sizes
from longtake.families.cogvideox_pixels import covering
from longtake.families.cogvideox_sizes import FunSizes
from tests.buckets.tables import clip_columns, golden, inputs
from tests.buckets.test_order import digests, steps, through_json, trained

FUN = "cogvideox_fun"
GOLDEN = Path(__file__).parents[1] / "golden" / FUN
COLLATED = "longtake.families.cogvideox_pixels:collated"
RULES = golden("size_rules.json", FUN)
COLLATE = golden("collate_decisions.json", FUN)["cases"]
FRAMES = golden("frame_indices.json", FUN)
ORDER = golden("sampler_order.json", FUN)
ADAPT = {"random_hw_adapt": True}
TOKENS = {**ADAPT, "training_with_video_token_length": True}


def law(patch: int | None = None, collate: bool = False, **sizes: Any) -> FunLaw:
    """A law of a model that joins `patch` latent frames to a token, and so takes no other odd number above one."""
    made = FunSizes(**sizes)
    lengths = [(frames, (frames - 1) // 4 + 1) for frames in range(1, made.video_sample_n_frames + 1, 4)]
    if patch:
        lengths = [(frames, -(-tokens // patch)) for frames, tokens in lengths if tokens == 1 or tokens % patch == 0]
    return FunLaw(made, 16, tuple(lengths), collate)


def found(made: FunLaw, clips: list[tuple[float, ...]], draw: Any = None, **u: float) -> list[Bucket | Unused]:
    """The buckets of clips (frames, height, width), under drawn numbers by their names."""
    columns = [np.array([clip[index] for clip in clips], np.float64) for index in range(3)]
    fps = np.array([clip[3] if len(clip) > 3 else np.nan for clip in clips])
    draw = draw or (lambda rows, name, frames, skip: np.full(len(rows), u[name]))
    codes = assign(made, *columns, fps, draw)
    return [Unused(code) if code < 0 else made.buckets[code] for code in codes.tolist()]


def shape(made: FunLaw, *clip: float, **u: float) -> tuple[int, int, int]:
    (bucket,) = found(made, [clip], **u)
    return bucket.shape


def drawn(weights: Mapping[float, float] | list[float], place: int) -> float:
    """A uniform number by which the option at a place is drawn."""
    shares = np.array(list(weights.values()) if isinstance(weights, Mapping) else weights)
    return float((np.cumsum(shares) - shares / 2)[place])


@pytest.mark.parametrize(
    ("size", "expected"), [(320, (240, 416)), (480, (352, 624)), (640, (480, 832)), (960, (720, 1248))]
)
def test_the_sizes_of_the_page_for_16_to_9(size: int, expected: tuple[int, int]) -> None:
    made = law(video_sample_size=size, video_sample_n_frames=49, video_sample_stride=1)
    assert shape(made, 49, 1080, 1920) == (49, *expected)


def test_the_lengths_of_the_page_at_one_number_of_tokens() -> None:
    made = law(video_sample_size=512, image_sample_size=1024, video_sample_n_frames=49, video_sample_stride=3, **TOKENS)
    longest = {side.name: int(side.longest.max()) for side in made._sides}
    assert longest == {"1024px": 9, "896px": 13, "819px": 1, "768px": 21, "683px": 1, "640px": 29, "512px": 49}
    of_512 = next(bucket for bucket in made.buckets if bucket.name == "512px/49f/1.00")
    assert dict(made.lengths)[49] * (of_512.shape[1] // 16) * (of_512.shape[2] // 16) == 13_312


@pytest.mark.parametrize(
    ("sizes", "stills", "videos"),
    [
        ((1024, 1024, 512, ADAPT), {1024, 819, 683, 512}, {(1024, 49), (819, 49), (683, 49), (512, 49)}),
        ((256, 1024, 512, ADAPT), {1024, 819, 683, 512, 256}, {(256, 49)}),  # of rule and example, the example
        ((256, 1024, 1024, TOKENS), {1024, 819, 683, 512, 256}, {(256 + 128 * k, 49) for k in range(7)}),
        (
            (256, 1024, 512, TOKENS),
            {1024, 819, 683, 512, 256},
            {(256, 49), (384, 49), (512, 49), (640, 29), (768, 21), (896, 13), (1024, 9)},
        ),
    ],
)
def test_the_ranges_of_sizes_of_the_page(sizes: tuple, stills: set[int], videos: set[tuple[int, int]]) -> None:
    video, image, tokens, modes = sizes
    made = law(
        video_sample_size=video, image_sample_size=image, token_sample_size=tokens, video_sample_n_frames=49, **modes
    )
    draw = keyed_draw(0, 0, 0, np.arange(3000, dtype=np.uint64))
    clips = [(400.0, 2000.0, 2000.0)] * 1500 + [(1.0, 2000.0, 2000.0)] * 1500
    buckets = found(made, clips, draw)
    assert {(int(each.resolution[:-2]), each.num_frames) for each in buckets[:1500]} == videos
    assert {int(each.resolution[:-2]) for each in buckets[1500:]} == stills


def test_random_hw_adapt_any_pair_of_sizes_has_distinct_sides() -> None:
    pairs = [(video, image) for video in range(256, 1600, 64) for image in range(256, 1600, 64)]
    for video, image in [*pairs, (683, 1025), (512, 769), (512, 768)]:
        made = law(video_sample_size=video, image_sample_size=image, **ADAPT)
        sides = {side.name: side.size for side in made._sides}
        assert set(sides.values()) == {*made._stills, *made._videos}, (video, image)
        assert len({round(size, 3) for size in sides.values()}) == len(made._sides), (video, image)
        assert {float(video), float(image)} <= set(sides.values())
        assert sides[f"{video}px"] == video


def test_probabilities_of_scaled_sizes_are_as_there() -> None:
    for case in RULES["random_hw_adapt"]:
        merged: dict[float, float] = {}
        for ratio, share in zip(case["ratios"], case["p"], strict=True):
            merged[float(ratio)] = merged.get(ratio, 0.0) + share
        assert scale_downs(case["sample_size"], tuple(case["extra"])) == pytest.approx(merged)


def test_lengths_by_tokens_are_as_there() -> None:
    """The loop's rule is the page's; the loader's, which can give more, is a quirk."""
    for most, token, video, image, expected in RULES["collate_frames"]:
        sizes = token_sizes(video, image)
        assert {str(size): frames_of_tokens(size, token, most, collate=True) for size in sizes} == expected
        of_page = [frames_of_tokens(size, token, most) for size in sizes]
        assert all(ours <= theirs for ours, theirs in zip(of_page, expected.values(), strict=True))
    assert (frames_of_tokens(1024, 512, 49), frames_of_tokens(1024, 512, 49, collate=True)) == (9, 13)


@cache
def law_of_any_size(most: int, token: int, patch: int | None, base: int) -> FunLaw:
    return law(
        patch,
        video_sample_size=base,
        image_sample_size=base,
        token_sample_size=token,
        video_sample_n_frames=most,
        video_sample_stride=1,
        keep_all_node_same_token_length=True,
    )


def test_a_budget_drawn_for_all_ranks_leaves_as_many_frames_as_there() -> None:
    bases = {(384, 672): 512, (480, 832): 640, (720, 1248): 960}
    for most, token, height, width, patch, expected in RULES["keep_all_node_frames"]:
        made = law_of_any_size(most, token, patch, bases.get((height, width), height))
        for place, frames in enumerate(expected.values()):
            u = (place + 0.5) / len(expected)
            assert shape(made, most, height, width, tokens=u) == (frames, height, width)


def test_a_video_in_ten_is_cut_to_a_shorter_length() -> None:
    for case in RULES["random_frame_crop"]:
        most = case["n_frames"]
        made = law(case["patch_size_t"], video_sample_n_frames=most, video_sample_stride=1, random_frame_crop=True)
        u = 0.5 if case["picked"] is None else 1 - drawn(case["p"][::-1], case["options"][::-1].index(case["picked"]))
        assert shape(made, max(2, most), 512, 512, frames=u)[0] == case["frames"]
    made = law(video_sample_n_frames=17, video_sample_stride=1, random_frame_crop=True)
    draw = keyed_draw(0, 0, 0, np.arange(30_000, dtype=np.uint64))
    lengths = [bucket.num_frames for bucket in found(made, [(20.0, 512.0, 512.0)] * 30_000, draw)]
    shares = np.bincount(lengths)[[5, 9, 13, 17]] / 30_000
    np.testing.assert_allclose(shares, RULES["random_frame_crop"][6]["p"], atol=0.004)


def test_small_buckets_have_the_batch_sizes_of_there() -> None:
    for case in RULES["auto_tile"]:
        modes = {"token_sample_size": case["token_sample_size"], "video_sample_n_frames": case["n_frames"]}
        made = law(auto_tile_batch_size=True, **modes, **TOKENS)
        assert made.tiles((case["frames"], case["h"], case["w"])) == case["copies"]


@pytest.mark.parametrize("case", COLLATE, ids=range(len(COLLATE)))
def test_the_bucket_of_a_clip_is_the_shape_of_there(case: dict) -> None:
    """Of batches of several the first clip, cut to the shortest: ours decides for each clip. Lengths are below the most
    that the loader there ever has."""
    args, first = case["args"], case["examples"][0]
    made = law(case["patch_size_t"], collate=True, video_sample_stride=1, **args)
    u, choices = {}, list(case["choices"])
    if args["random_ratio_crop"]:
        ratio = choices.pop()
        u["ratio"] = drawn(ratio["p"], ratio["options"].index(ratio["picked"]))
    if choices:
        share = choices[0]["p"] or [1 / len(choices[0]["options"])] * len(choices[0]["options"])
        options = [float(option) for option in choices[0]["options"]]
        sizes = made._stills if case["data_type"] == "image" else made._videos
        if choices[0]["p"]:
            base = args["image_sample_size" if case["data_type"] == "image" else "video_sample_size"]
            place = list(sizes).index(base / choices[0]["picked"])
            u["image size"] = u["video size"] = drawn(sizes, place)
        else:
            u["video size"] = drawn(share, options.index(choices[0]["picked"]))
    frames = min(min(example[0] for example in case["examples"]), args["video_sample_n_frames"])
    expected = case["pixel_values"]
    got = shape(made, 1 if case["data_type"] == "image" else max(frames, 2), first[1], first[2], **u)
    assert got[1:] == (expected[3], expected[4])
    assert got[0] == (expected[1] if expected[1] <= args["video_sample_n_frames"] else made.lengths[-1][0])


@pytest.mark.parametrize("case", FRAMES["clips"], ids=range(len(FRAMES["clips"])))
def test_the_frames_that_are_read_are_those_of_there(case: dict) -> None:
    """A video of one frame is a still here, and trains."""
    begin, end = case["drop"]
    made = law(
        video_sample_n_frames=case["n_frames"],
        video_sample_stride=case["stride"],
        video_length_drop_start=begin,
        video_length_drop_end=end,
    )
    columns = tuple(np.array([value], np.float64) for value in (case["length"], 512, 512, 24))
    timing, room = made._room(columns)
    if case["length"] == 1:
        assert room[0] == 1
        return
    assert (room[0] < 1) == ("error" in case)
    if "error" in case:
        assert found(made, [(case["length"], 512, 512)]) == [Unused.TOO_SHORT]
        return
    first, stop, interval = int(timing.first[0]), int(timing.stop[0]), int(timing.interval[0])
    starts = stop - first - (int(room[0]) - 1) * interval
    low, high = (case["start_draw"] or [[case["index"][0]] * 2])[0]
    assert (first, starts) == (low, high - low + 1)
    u = (case["index"][0] - low + 0.5) / starts
    assert (first + even_window(stop - first, int(room[0]), interval, u)).tolist() == case["index"]


def test_a_batch_there_is_of_one_aspect_ratio_of_ours() -> None:
    made = law(video_sample_n_frames=49)
    sizes = [(1 if kind != "video" else 400, float(h), float(w)) for kind, h, w in zip(
        ORDER["type"], ORDER["height"], ORDER["width"], strict=True)]  # fmt: skip
    buckets = found(made, sizes)
    for run in ORDER["aspect_ratio_batches"]:
        for batch in (batch for epoch in run["epochs"] for batch in epoch):
            assert len({(buckets[item].num_frames == 1, buckets[item].ratio) for item in batch}) == 1


def test_frames_by_rate_and_tokens_by_a_bound() -> None:
    made = law(video_sample_n_frames=49, video_sample_stride=3, video_sample_fps=8)
    columns = tuple(np.array(values, np.float64) for values in ([400] * 4, [512] * 4, [512] * 4, [24, 30, 4, np.nan]))
    timing = made.timing(columns, keyed_draw(0, 0, 0, np.arange(4, dtype=np.uint64)))
    assert timing.interval.tolist() == [3, 4, 1, 3]
    assert timing.rate.tolist() == [8, 7.5, 4, 0]
    made = law(video_sample_size=256, image_sample_size=1024, video_sample_n_frames=49, token_budget=5000, **TOKENS)
    tokens = dict(made.lengths)
    most = [tokens[each.num_frames] * each.shape[1] * each.shape[2] // 256 for each in made.buckets]
    assert 4000 < max(most) <= 5000
    with pytest.raises(ValueError, match="a single frame of size 1024 has 4096 tokens; raise it"):
        found(law(image_sample_size=1024, token_budget=4000), [(1, 512, 512)])


def test_without_buckets_a_square_is_cut_out() -> None:
    made = law(enable_bucket=False, video_sample_size=256, image_sample_size=512, video_sample_stride=1)
    assert shape(made, 17, 720, 1280) == (17, 256, 256)
    assert shape(made, 1, 720, 1280) == (1, 512, 512)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"random_hw_adapt": True, "enable_bucket": False}, "random_hw_adapt = True: acts with enable_bucket = True"),
        ({"training_with_video_token_length": True}, "acts with random_hw_adapt = True only; write that too"),
        ({"auto_tile_batch_size": True}, "acts with training_with_video_token_length = True only"),
        ({"video_sample_size": 640, **TOKENS}, "it is the largest size of videos too, and video_sample_size = 640"),
        ({"crop": "none", "random_ratio_crop": True}, 'cuts pictures to another shape; write crop = "cover"'),
        ({"video_length_drop_start": 0.5, "video_length_drop_end": 0.5}, "so no frame is left; lower it"),
    ],
)
def test_modes_that_would_not_act_are_refused(sizes: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        FunSizes(**sizes)


MODES = st.fixed_dictionaries(
    {name: st.booleans() for name in ("random_frame_crop", "random_ratio_crop", "keep_all_node_same_token_length")}
)


@settings(max_examples=15)
@given(MODES, st.integers(1, 120), st.integers(0, 20), st.data())
def test_an_order_with_random_modes_restarts_and_changes_without_loss(
    modes: dict, num_clips: int, table: int, data: st.DataObject
) -> None:
    sizes = {"video_sample_size": 64, "image_sample_size": 256, "token_sample_size": 64, "video_sample_stride": 2}
    rule = law(**sizes, **TOKENS, **modes)
    assert read_law(through_json(rule.to_json())) == rule
    made = inputs(num_clips + 30, table, rule=rule)
    order = plan_pass(made, 0)
    place = data.draw(st.integers(0, order.num_steps))
    state = through_json(order.state(place))
    assert digests(plan_pass(made, 0, state)) == digests(order)[place:]
    other = inputs(num_clips + 30, table, rule=law(**sizes))
    seen = trained(steps(order)[:place]) + trained(steps(plan_pass(other, 0, state)))
    assert len(seen) == len(set(seen))


def test_every_clip_has_a_bucket_or_a_reason() -> None:
    columns = clip_columns(3000)
    draw = keyed_draw(0, 0, 0, columns.pop("clip_ids"))
    made = law(video_sample_size=64, image_sample_size=256, **TOKENS, random_frame_crop=True)
    codes = assign(made, *columns.values(), draw)
    unused = {Unused(code) for code in codes[codes < 0].tolist()}
    assert unused <= {Unused.TOO_SHORT, Unused.INVALID}
    assert json.loads(json.dumps(made.content()))["sizes"]["random_frame_crop"] is True


def test_what_a_crop_takes_away_is_reported_and_none_takes_nothing() -> None:
    sizes = {"video_sample_size": 64, "image_sample_size": 64, "video_sample_stride": 1}
    cut = plan_pass(inputs(200, rule=law(**sizes)), 0).report
    whole = plan_pass(inputs(200, rule=law(crop="none", **sizes)), 0).report
    assert 0 < cut.area_cut < 0.5
    assert (whole.area_cut, whole.num_used) == (0, cut.num_used)
    frame = np.zeros((30, 61, 3), np.uint8)
    frame[:, -1] = 255  # would be cut away
    assert fit_frame(frame, (32, 48), "whole")[:, :, -1].min() > 100
    assert fit_frame(frame, (32, 48), "bytes")[:, :, -1].max() == 0


@pytest.mark.parametrize("place", range(3))
def test_pixels_under_the_quirk_are_those_of_there(place: int) -> None:
    """A second clip is scaled there by the first one's shape."""
    tensors = load_file(GOLDEN / "collate_pixels.safetensors")
    given, expected = (tensors[f"case{place}.{name}"] for name in ("clip0", "pixel_values"))
    size = tuple(expected.shape[-2:])
    for frame, wanted in zip(given.numpy(), expected[0], strict=False):
        np.testing.assert_allclose(fit_frame(frame, size, COLLATED), wanted.numpy(), atol=1e-5)


@pytest.mark.parametrize("case", COLLATE, ids=range(len(COLLATE)))
def test_what_a_frame_is_scaled_to_under_the_quirk_is_as_there(case: dict) -> None:
    """The rule by which ours covers rounds in place of cutting off, which is a pixel at most."""
    (_, height, width, _), one = case["examples"][0], case["per_example"][0]
    assert list(covering((height, width), tuple(one["crop"]))) == one["resize"]
    assert np.abs(np.subtract(cover_size((height, width), tuple(one["crop"])), one["resize"])).max() <= 1


def test_budgets_drawn_for_all_ranks_stand_side_by_side() -> None:
    sizes = {"video_sample_size": 512, "image_sample_size": 512, "token_sample_size": 512, "video_sample_stride": 1}
    rule = law(video_sample_n_frames=49, keep_all_node_same_token_length=True, **sizes)
    cost = CostModel(0.0, 1.0, 0.0, LatentShape(16, 4, 8, causal=True), 2, side_by_side=4)
    columns = {name: np.full(2000, value) for name, value in (("num_frames", 60), ("height", 512), ("width", 512))}
    made = inputs(2000, rule=rule, cost=cost, window_steps=64, **columns)
    order = plan_pass(made, 0)
    apart = [len({slot.bucket.num_frames for slot in order.step(step)}) > 1 for step in range(order.num_steps)]
    assert len({bucket.num_frames for step in range(20) for bucket in [order.step(step)[0].bucket]}) > 2
    assert np.mean(apart) < 0.05, "a group of four has one length, but where one length gives way to another"


def test_lengths_follow_from_what_the_model_and_its_autoencoder_take() -> None:
    def config(refuses: Any, has: Any = lambda frames: True) -> Any:
        ae = SimpleNamespace(latent=LatentShape(16, 4, 8, causal=True), has_length=has)
        model = SimpleNamespace(patch=(2, 2, 2), refuses_length=refuses)
        return SimpleNamespace(ae=ae, model=model, size_divisor=16, quirks=frozenset())

    sizes = FunSizes(video_sample_n_frames=49)
    made = fun_law(sizes, config(lambda latents: "odd" if latents > 1 and latents % 2 else None))
    assert made.lengths == ((1, 1), (5, 1), (13, 2), (21, 3), (29, 4), (37, 5), (45, 6))
    with pytest.raises(ValueError, match=r"up to that are none; 1 is needed, and another one for videos"):
        fun_law(sizes, config(lambda latents: None, lambda frames: False))
