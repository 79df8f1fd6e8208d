from __future__ import annotations

import ctypes
import multiprocessing
import pickle
import signal
import threading
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch

from longtake.buckets.assignment import BucketRule, assign
from longtake.buckets.protocol import BucketDraw, Columns, Timing, Unused, keyed_draw
from longtake.contracts import Batch, Slot
from longtake.data.clips.captions import caption
from longtake.data.clips.transforms import resize_crop, window
from longtake.data.clips.video import ClipError, read_frames, write_image, write_video
from longtake.data.loading import dataset
from longtake.data.loading.dataset import ClipCache, time_limit
from longtake.data.loading.draws import draw, window_draws
from longtake.data.loading.loader import SlotLoader
from longtake.data.probing.probe import probe_table
from longtake.data.rules import OWN, SampleRules
from longtake.data.tables.table import ClipTable
from tests.data.made_clips import DRAWS, LATENT, make_dataset, make_slot, noise_frames
from tests.train.runs import PATIENCE_SECONDS

FAST, STILL, CUT, MISSING = 5, 6, 7, 8  # rows
PUBLISHED = SampleRules(caption="rate_as_published", window="spread", pixels="float32")


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> ClipTable:
    """Rows 0-4: clips of 20 frames; then a fast clip, a still, a clip with fewer frames than stated, a missing file."""
    folder = tmp_path_factory.mktemp("set")
    for number in range(5):
        write_video(folder / f"{number}.mp4", noise_frames(20, 24, 32, seed=number), 12)
    write_video(folder / "fast.mp4", noise_frames(20, 24, 32, seed=9), 48)
    write_image(folder / "still.png", noise_frames(1, 40, 24)[0])
    write_video(folder / "cut.mp4", noise_frames(20, 24, 32, seed=7), 12)
    write_video(folder / "missing.mp4", noise_frames(20, 24, 32, seed=8), 12)
    names = [*(f"{number}.mp4" for number in range(5)), "fast.mp4", "still.png", "cut.mp4", "missing.mp4"]
    rows = [f"{name},clip {place},{'' if name == 'still.png' else place}" for place, name in enumerate(names)]
    (folder / "list.csv").write_text("path,text,score_vmafmotion\n" + "\n".join(rows) + "\n")
    probe_table(folder / "list.csv", folder / "clips.parquet")
    write_video(folder / "cut.mp4", noise_frames(2, 24, 32, seed=7), 12)
    (folder / "missing.mp4").unlink()
    return ClipTable.open(folder / "clips.parquet")


def same(a: Batch, b: Batch) -> bool:
    """Bitwise equality of everything."""
    for field in fields(Batch):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if field.name in ("draws", "choices"):
            if x.keys() != y.keys() or not all(np.array_equal(x[name], y[name]) for name in x):
                return False
        elif isinstance(x, torch.Tensor):
            if x.dtype != y.dtype or not torch.equal(x, y):
                return False
        elif not np.array_equal(x, y) if isinstance(x, np.ndarray) else x != y:
            return False
    return True


def many_slots(table: ClipTable, count: int = 12) -> list[Slot]:
    rng = np.random.default_rng(0)
    return [make_slot(table, rng.permutation(9)[:3].tolist(), pass_index=place % 2) for place in range(count)]


def test_a_sample_is_its_window_resized_with_its_caption_and_draws(table: ClipTable) -> None:
    slot = make_slot(table, [3, FAST])
    batch = make_dataset(table)[slot]
    place = window_draws(slot, 7, 0)
    for i, (row, interval) in enumerate([(3, 1), (FAST, 2)]):
        frames = read_frames(table.location(row))[window(20, 5, interval, place[i])]
        assert torch.equal(batch.video[i], resize_crop(frames, (16, 16)))
    assert batch.video.dtype == torch.uint8
    assert batch.video.shape == (2, 3, 5, 16, 16)
    assert batch.text == (caption("clip 3", 12, 3), caption("clip 5", 24, 5))
    assert batch.fps.tolist() == [12, 24]
    assert batch.size.tolist() == [[24, 32], [24, 32]]
    assert batch.weights.tolist() == [1, 1]
    assert batch.faults == ()
    assert batch.keys is slot.keys
    for name, values in draw(slot, 7, 0, LATENT, DRAWS).items():
        found = torch.from_numpy(batch.choices[name]) if DRAWS[name].is_choice else batch.draws[name]
        assert torch.equal(found, values)


def test_a_still_fills_a_bucket_of_one_frame(table: ClipTable) -> None:
    batch = make_dataset(table)[make_slot(table, [STILL], (1, 16, 16))]
    assert batch.video.shape == (1, 3, 1, 16, 16)
    assert batch.text == ("clip 6.",)
    assert batch.fps.tolist() == [0]
    assert batch.size.tolist() == [[40, 24]]


def test_the_motion_score_can_be_left_out(table: ClipTable) -> None:
    assert make_dataset(table, vmaf=False)[make_slot(table, [3])].text == ("clip 3. 12 FPS.",)


def test_published_rules_give_the_floats_and_texts_of_the_reference(table: ClipTable) -> None:
    slot = make_slot(table, [3])
    batch = make_dataset(table, rules=PUBLISHED)[slot]
    frames = read_frames(table.location(3))[window(20, 5, 1, window_draws(slot, 7, 0)[0], "spread")]
    assert batch.video.dtype == torch.float32
    assert torch.equal(batch.video[0], resize_crop(frames, (16, 16), "float32"))
    assert batch.text == ("clip 3 12.0 FPS, 3 motion score.",)
    unlimited = make_dataset(table, rules=PUBLISHED, fps_max=None)[slot]
    assert unlimited.text == ("clip 3 3 motion score.",), "no rate is told without a ceiling"


def listed(text: str, fps: float | None, score: int | None, kind: str, facts: dict[str, str]) -> str:
    return f"{kind} {text} {fps} of {facts['source_fps']:g}, {facts['text']}"


def from_the_start(total: int, num_frames: int, interval: int, u: float) -> np.ndarray:
    return interval * np.arange(num_frames)


def halved(pixels: np.ndarray, size: tuple[int, int], still: bool) -> np.ndarray:
    return pixels[: size[0], : size[1]].transpose(2, 0, 1).astype(np.float32) / 510


def test_a_family_may_have_forms_of_its_own(table: ClipTable) -> None:
    names = {"caption": "listed", "window": "from_the_start", "pixels": "halved"}
    rules = SampleRules(**{key: f"{__name__}:{form}" for key, form in names.items()}, facts=("text",))
    batch = make_dataset(table, rules=rules)[make_slot(table, [3])]
    frames = read_frames(table.location(3))[:5, :16, :16].transpose(3, 0, 1, 2)
    assert torch.equal(batch.video[0], torch.from_numpy(frames.astype(np.float32) / 510))
    assert batch.text == ("train clip 3 12.0 of 12, clip 3",)


def test_another_pass_takes_another_window_and_views_come_back(table: ClipTable) -> None:
    passes = [make_dataset(table)[make_slot(table, [0, 1, 2], pass_index=number)].video for number in range(3)]
    assert not torch.equal(passes[0], passes[1])
    assert not torch.equal(passes[0], passes[2])
    viewed = [make_dataset(table, views=2)[make_slot(table, [0, 1, 2], pass_index=n)].video for n in range(4)]
    assert torch.equal(viewed[0], viewed[2])
    assert torch.equal(viewed[1], viewed[3])
    assert not torch.equal(viewed[0], viewed[1])


def test_a_sample_is_the_same_alone_and_among_others(table: ClipTable) -> None:
    together = make_dataset(table)[make_slot(table, [0, 1, 2])]
    alone = make_dataset(table)[make_slot(table, [2])]
    assert torch.equal(together.video[2], alone.video[0])
    assert torch.equal(together.draws["noise"][2], alone.draws["noise"][0])


@pytest.mark.parametrize(
    ("row", "reason"),
    [(MISSING, "^no such file$"), (CUT, "^frame [0-9]+ was asked for, but the file ends after 2 frames$")],
)
@pytest.mark.parametrize("cache_mb", [0, 50])
def test_a_failing_sample_keeps_its_place_at_weight_0(row: int, reason: str, cache_mb: int, table: ClipTable) -> None:
    slot = make_slot(table, [row, 3, 4], pass_index=2)
    batch = make_dataset(table, cache_mb=cache_mb)[slot]
    assert batch.weights.tolist() == [0, 1, 1]
    assert torch.equal(batch.video[0], batch.video[1]), "the place is filled from a neighbour"
    assert len(batch.faults) == 1
    fault = batch.faults[0]
    assert (fault.path, fault.sample, fault.pass_index) == (table.written_path(row), int(slot.samples[0]), 2)
    with pytest.raises(ClipError, match=reason):
        raise ClipError(fault.reason)
    good = make_dataset(table)[make_slot(table, [3, 4], pass_index=2)]
    assert torch.equal(batch.video[1:], good.video), "its neighbours are not touched"
    assert slot.weights.tolist() == [1, 1, 1], "the slot is not changed"


def test_a_slot_without_a_good_sample_is_zeros_of_the_same_shape(table: ClipTable) -> None:
    batch = make_dataset(table)[make_slot(table, [MISSING, MISSING])]
    assert batch.video.shape == (2, 3, 5, 16, 16)
    assert not batch.video.any()
    assert batch.weights.tolist() == [0, 0]
    assert len(batch.faults) == 2


def test_fillers_and_quarantined_samples_are_not_decoded(table: ClipTable, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    original = dataset.decode_frames
    monkeypatch.setattr(
        dataset, "decode_frames", lambda path, *rest: read.append(Path(path).name) or original(path, *rest)
    )
    bad = {int(table.clip_ids[1]): 4, int(table.clip_ids[2]): 3}
    slot = make_slot(table, [0, 1, 2, 3], weights=[1, 1, 1, 0], pass_index=4)
    batch = make_dataset(table, quarantined=bad)[slot]
    assert read == ["0.mp4", "2.mp4"], "row 1 failed in this pass, row 3 is a filler"
    assert batch.weights.tolist() == [1, 0, 1, 0]
    assert batch.faults == ()
    assert torch.equal(batch.video[1], batch.video[0])


def test_a_clip_that_takes_too_long_is_a_fault(table: ClipTable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "decode_frames", lambda *_: time.sleep(30))
    batch = make_dataset(table, timeout_seconds=0.05)[make_slot(table, [0])]
    assert batch.faults[0].reason == "took longer than 0.05 s (dataset.timeout_seconds)"


def test_a_mistake_of_ours_is_not_taken_for_a_bad_clip(table: ClipTable, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise KeyError("ours")

    monkeypatch.setattr(dataset, "decode_frames", broken)
    with pytest.raises(KeyError, match="ours"):
        make_dataset(table)[make_slot(table, [0])]


def test_the_time_limit_gives_back_the_timer_it_found() -> None:
    """With what was left of it, less what the body took."""

    def ring(*_: object) -> None:
        raise AssertionError("nothing takes an hour")

    handler = signal.signal(signal.SIGALRM, ring)
    before = signal.setitimer(signal.ITIMER_REAL, 3600, 7200)
    try:
        with time_limit(1800):
            time.sleep(0.05)
        left, interval = signal.getitimer(signal.ITIMER_REAL)
        assert 1800 < left <= 3600 - 0.05
        assert interval == 7200
        assert signal.getsignal(signal.SIGALRM) is ring
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)
        signal.signal(signal.SIGALRM, handler)


def test_the_time_limit_is_left_out_in_other_threads() -> None:
    done: list[bool] = []

    def body() -> None:
        with time_limit(0.01):
            time.sleep(0.05)
            done.append(True)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert done == [True]


def plain_video(table: ClipTable, slot: Slot) -> torch.Tensor:
    """The first sample of a slot, put together by hand."""
    frames = read_frames(table.location(int(slot.rows[0])))
    return resize_crop(frames[window(20, 5, 1, window_draws(slot, 7, 0)[0])], (16, 16))


def test_the_cache_changes_nothing_but_the_reading(table: ClipTable, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = many_slots(table)
    plain = [make_dataset(table)[slot] for slot in slots]
    cached = make_dataset(table, cache_mb=50)
    assert all(same(a, cached[slot]) for a, slot in zip(plain, slots, strict=True))
    monkeypatch.setattr(dataset, "decode_frames", lambda *_: pytest.fail("a clip was read again"))
    again = make_slot(table, [0, 1, 2])
    assert torch.equal(cached[again].video[0], plain_video(table, again))


def test_the_cache_stays_within_its_size_and_gives_up_the_oldest() -> None:
    cache = ClipCache(1000)
    clips = {(row, 10, 10): np.full((1, 3, 10, 10), row, np.uint8) for row in range(5)}  # 300 bytes each
    keys = list(clips)
    for key in keys[:3]:
        cache.put(key, clips[key])
    assert cache.get(keys[0]) is clips[keys[0]]  # used: row 1 is now the oldest
    cache.put(keys[3], clips[keys[3]])
    assert [key[0] for key in keys if cache.get(key) is not None] == [0, 2, 3]
    cache.put((9, 10, 10), np.zeros(2000, np.uint8))
    assert cache.get((9, 10, 10)) is None
    assert len(cache) == 3
    assert cache.has_room(250)
    assert not cache.has_room(251)


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_batches_are_bitwise_the_same_for_any_number_of_workers(num_workers: int, table: ClipTable) -> None:
    slots = many_slots(table)
    expected = [make_dataset(table)[slot] for slot in slots]
    assert any(batch.faults for batch in expected)
    loader = SlotLoader(make_dataset(table, cache_mb=10), num_workers)
    for part in (slice(0, 7), slice(7, None)):  # the workers live on between fetches
        got = list(loader.fetch(iter(slots[part])))
        assert all(same(a, b) for a, b in zip(got, expected[part], strict=True))


def test_a_fetch_that_is_left_early_does_not_mix_into_the_next(table: ClipTable) -> None:
    slots = many_slots(table)
    loader = SlotLoader(make_dataset(table), num_workers=2)
    assert next(loader.fetch(slots)).keys.tolist() == slots[0].keys.tolist()
    got = list(loader.fetch(slots[5:9]))
    assert [batch.keys.tolist() for batch in got] == [slot.keys.tolist() for slot in slots[5:9]]


def test_slots_are_read_only_a_little_ahead(table: ClipTable) -> None:
    asked: list[int] = []

    def endless() -> object:
        while True:
            asked.append(len(asked))
            yield make_slot(table, [0])

    batches = SlotLoader(make_dataset(table), num_workers=1, prefetch_factor=3).fetch(endless())
    for _ in range(4):
        next(batches)
    assert len(asked) <= 4 + 3


def test_the_loader_leaves_torchs_generator_alone(table: ClipTable) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    for num_workers in (0, 1):
        next(SlotLoader(make_dataset(table), num_workers).fetch([make_slot(table, [0])]))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_dataset_survives_pickling_without_its_cache(table: ClipTable) -> None:
    data = make_dataset(table, cache_mb=50)
    slot = make_slot(table, [0, 1])
    expected = data[slot]
    packed = pickle.dumps(data)
    assert len(packed) < 4000
    assert same(pickle.loads(packed)[slot], expected)
    assert same(pickle.loads(pickle.dumps(expected)), expected)


def test_a_still_cannot_stand_for_a_video(table: ClipTable) -> None:
    assert make_dataset(table)[make_slot(table, [STILL])].faults[0].reason == "a still cannot fill 5 frames"


def test_frames_are_reduced_one_by_one_to_what_the_whole_clip_would_give(table: ClipTable) -> None:
    for rules in (OWN, PUBLISHED):
        slot = make_slot(table, [0, 1], (5, 12, 20))
        batch = make_dataset(table, rules=rules)[slot]
        place = window_draws(slot, 7, 0)
        for i in range(2):
            frames = read_frames(table.location(i))[window(20, 5, 1, place[i], rules.window)]
            assert torch.equal(batch.video[i], resize_crop(frames, (12, 20), rules.pixels))


def test_a_clip_is_never_held_at_source_size(tmp_path: Path) -> None:
    height, width, count = 360, 640, 40
    write_video(tmp_path / "large.mp4", noise_frames(count, height, width), 24)
    (tmp_path / "clips.csv").write_text(
        f"path,text,num_frames,height,width,fps\nlarge.mp4,a,{count},{height},{width},24\n"
    )
    table = ClipTable.open(tmp_path / "clips.csv")
    data, slot = make_dataset(table), make_slot(table, [0], (count, 16, 16))
    data[slot]  # so that what is imported or made once is not counted
    tracemalloc.start()
    try:
        data[slot]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * height * width * 3, "a few frames at a time, of forty"


def test_a_slot_that_fails_halfway_through_a_clip_leaves_zeros(
    table: ClipTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks_off(*_: object) -> Iterator[tuple[list[int], np.ndarray]]:
        yield [0], np.full((24, 32, 3), 255, np.uint8)
        raise ClipError("damaged")

    monkeypatch.setattr(dataset, "decode_frames", breaks_off)
    batch = make_dataset(table)[make_slot(table, [0])]
    assert batch.faults[0].reason == "damaged"
    assert not batch.video.any()


def _hang_in_c(seconds: float) -> None:
    """Waits for ever in a call that gives neither Python nor its signal handlers a turn."""
    lock = ctypes.create_string_buffer(64)
    library = ctypes.PyDLL(None)
    with time_limit(seconds):
        library.pthread_mutex_lock(lock)
        library.pthread_mutex_lock(lock)


def test_a_worker_whose_decoder_hangs_ends_itself() -> None:
    context = multiprocessing.get_context("fork")
    for daemon in (True, False):
        process = context.Process(target=_hang_in_c, args=(0.1,), daemon=daemon)
        process.start()
        process.join(PATIENCE_SECONDS if daemon else 1)
        assert process.exitcode == (1 if daemon else None), "only a loader's worker can be spared"
        process.kill()
        process.join()


@pytest.mark.parametrize("stride", [1, 3])
def test_a_stride_counts_alike_for_the_bucket_and_for_the_reader_whatever_the_rate(
    table: ClipTable, stride: int
) -> None:
    """20 frames at a stride of 3 are 6, so 5 fit; the faster clip is read no other way."""
    rules = SampleRules(caption="plain", stride=stride, still_fps=120)
    law = BucketRule.from_config({"16px_ar1:1": {5: (1.0, 2), 1: (1.0, 2)}}, 8, 24, frame_interval=rules.stride)
    made = make_dataset(table, rules=rules)
    slot = make_slot(table, [3, FAST])
    columns = (table.num_frames, table.height, table.width, table.fps)
    codes = assign(law, *columns, keyed_draw(7, 0, 0, table.clip_ids))
    assert [law.buckets[codes[row]].num_frames for row in (3, FAST, STILL)] == [5, 5, 1]
    batch, place = made[slot], window_draws(slot, 7, 0)
    for i, row in enumerate((3, FAST)):
        frames = read_frames(table.location(row))[window(20, 5, stride, place[i])]
        assert torch.equal(batch.video[i], resize_crop(frames, (16, 16)))
    assert torch.equal(batch.fps, torch.tensor([12.0, 48.0]) / stride)
    assert made[make_slot(table, [STILL], (1, 16, 16))].fps.tolist() == [120]
    longer = BucketRule.from_config({"16px": {7: (1.0, 2)}}, 8, 24, frame_interval=3)
    assert assign(longer, *columns, keyed_draw(7, 0, 0, table.clip_ids))[3] == Unused.TOO_SHORT


class Halves(BucketRule):
    """A law that lets the second half of each clip be used, and draws the stride of each sample."""

    def timing(self, columns: Columns, draw: BucketDraw) -> Timing:
        total = columns[0].astype(np.int64)
        interval = 1 + (draw(np.arange(len(total)), "stride", 0, False) < 0.5)
        return Timing(columns[3] / interval, interval, total // 2, total)


def test_a_law_of_its_own_says_which_frames_may_be_used(table: ClipTable) -> None:
    made = make_dataset(table, law=Halves((), 8))
    seen = set()
    for pass_index in range(6):
        slot = make_slot(table, [0, 1, 2], pass_index=pass_index)
        batch, place = made[slot], window_draws(slot, 7, 0)
        intervals = made.timing(slot).interval.tolist()
        for i, interval in enumerate(intervals):
            frames = read_frames(table.location(i))[10 + window(10, 5, interval, place[i])]
            assert torch.equal(batch.video[i], resize_crop(frames, (16, 16)))
        assert batch.fps.tolist() == [12 / interval for interval in intervals]
        seen.update(intervals)
    assert seen == {1, 2}


def test_captions_of_segments_are_as_many_as_the_sample_needs_or_cost_the_clip(tmp_path: Path) -> None:
    cells = ['["a", "b"]', "a", '["a", 2]', '["a", "b", "c"]', '["a"', '["é"]']
    for number in range(len(cells)):
        write_video(tmp_path / f"{number}.mp4", noise_frames(5, 16, 16, seed=number), 12)
    rows = [f'{number}.mp4,"{cell.replace(chr(34), 2 * chr(34))}"' for number, cell in enumerate(cells)]
    (tmp_path / "list.csv").write_text("path,text\n" + "\n".join(rows) + "\n")
    probe_table(tmp_path / "list.csv", tmp_path / "clips.parquet")
    table = ClipTable.open(tmp_path / "clips.parquet")
    made = make_dataset(table, rules=SampleRules(caption="plain", segments=lambda frames: 2 if frames > 1 else 1))
    batch = made[make_slot(table, range(6))]
    assert batch.text == (("a", "b"), *[("", "")] * 5)
    assert batch.weights.tolist() == [1, 0, 0, 0, 0, 0]
    assert [fault.reason for fault in batch.faults] == [
        "captions found: 1, needed: 2, for a sample of 5 frames",
        "its captions are not a JSON array of texts; needed: 2, for a sample of 5 frames",
        "captions found: 3, needed: 2, for a sample of 5 frames",
        "captions found: 1, needed: 2, for a sample of 5 frames",
        "captions found: 1, needed: 2, for a sample of 5 frames",
    ]
    still = made[make_slot(table, [1, 5, 0], (1, 16, 16))]
    assert still.text == (("a",), ("é",), ("",))
    assert still.weights.tolist() == [1, 1, 0]
