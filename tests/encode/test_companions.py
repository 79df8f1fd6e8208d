"""What clips bring along, a control video, poses and stills: cut as the clip is, online and out of a store alike."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from longtake.contracts import Slot, UserError
from longtake.data.clips.captions import read_frame_numbers
from longtake.data.clips.video import ClipError, read_frames, write_image, write_video
from longtake.data.latents.dataset import StoredDataset
from longtake.data.latents.store import LatentStore
from longtake.data.loading.dataset import SlotDataset
from longtake.data.loading.draws import window_draws
from longtake.data.rules import Companion
from longtake.data.tables.mix import open_clips
from longtake.encode.auto import store_size
from longtake.encode.changed import FilesThen, compare_files
from longtake.encode.plan import EncodePlan
from longtake.encode.verify import verify_store
from longtake.families import registry
from longtake.families.opensora_v2 import OPENSORA_V2
from longtake.parallel.mesh import Mesh
from longtake.parallel.world import start_world
from longtake.random import Purpose
from longtake.system.build import build_system
from longtake.system.examples import clean_example, wanted_draws
from longtake.train.run_file import read_run
from tests.data.made_clips import noise_frames
from tests.encode.stores import make_store
from tests.train.runs import write_config

COMPANIONS = (
    Companion("control", "edges", "video", "control"),
    Companion("poses", "camera", "numbers", "camera", width=3, header=1),
    Companion("object", "references", "stills", "object", most=2, required=False),
)
COUNT, FRAMES = 6, 20
GOOD, SHORT, NO_POSES, THREE = 0, 1, 2, 3  # rows


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Clips of 20 frames whose control video counts its frames, and whose poses do; some of them are at fault."""
    family = replace(OPENSORA_V2, companions=lambda model: COMPANIONS)
    monkeypatch.setitem(registry._FAMILIES, OPENSORA_V2.model, family)
    folder = tmp_path / "clips"
    folder.mkdir()
    for row in range(COUNT):
        write_video(folder / f"{row}.mp4", noise_frames(FRAMES, 32, 32, seed=row), 12)
        write_video(folder / f"edges{row}.mp4", noise_frames(5 if row == SHORT else FRAMES, 32, 32, seed=90 + row), 12)
        lines = ["a header"] + [f"{row}, {frame} {frame / 8}" for frame in range(FRAMES)]
        (folder / f"{row}.txt").write_text("\n".join(lines) + "\n")
        write_image(folder / f"{row}.png", noise_frames(1, 40, 32, seed=row)[0])
    columns = {
        "path": [f"{row}.mp4" for row in range(COUNT)],
        "text": [f"clip {row}" for row in range(COUNT)],
        "num_frames": [FRAMES] * COUNT,
        "height": [32] * COUNT,
        "width": [32] * COUNT,
        "fps": [12.0] * COUNT,
        "edges": [f"edges{row}.mp4" for row in range(COUNT)],
        "camera": ["" if row == NO_POSES else f"{row}.txt" for row in range(COUNT)],
        "references": ["0.png", "", "", json.dumps(["1.png", "2.png", "3.png"]), '["4.png", "5.png"]', ""],
    }
    pq.write_table(pa.table(columns), folder / "clips.parquet")
    return write_config(tmp_path, folder / "clips.parquet")


def slot_of_all(run: object, store: LatentStore, folder: Path) -> Slot:
    """All six clips side by side in view 0."""
    plan = EncodePlan.read(folder / "plan.arrow", store.facts)
    entries = np.flatnonzero(plan.view == 0)
    assert len(entries) == COUNT
    (slot,) = plan.slots(run.bucket_rule, 0, COUNT, COUNT)
    return slot


@pytest.mark.parametrize("name", ["edges0.mp4", "3.txt", "2.png"])  # 2.png is one of three that row 3 names
@pytest.mark.parametrize("is_of_equal_size", [True, False])
def test_store_of_changed_auxiliary_inputs_is_told_from_a_whole_one(
    config: Path, tmp_path: Path, name: str, is_of_equal_size: bool
) -> None:
    make_store(config, tmp_path / "store")
    run = read_run(str(config), []).value
    table, columns = open_clips(run.dataset, run.sample_rules.columns), run.sample_rules.companion_columns
    assert columns == ("edges", "camera", "references")
    assert verify_store(tmp_path / "store", table, columns=columns).changed == []
    contents = (tmp_path / "clips" / name).read_bytes()
    changed = contents[:-1] + bytes([contents[-1] ^ 1]) if is_of_equal_size else contents + b"0"
    (tmp_path / "clips" / name).write_bytes(changed)
    clip = "0.mp4" if name == "edges0.mp4" else "3.mp4"
    (sentence,) = verify_store(tmp_path / "store", table, columns=columns).changed
    assert sentence.startswith(f"{clip} has changed since")
    store = LatentStore.open(tmp_path / "store")
    names = ("row", "file_bytes", "file_mtime_ns", "file_digest")
    changes = compare_files(FilesThen(*(store.column(name) for name in names)), table, columns)
    assert {table.written_path(row) for row in changes.changed} == {clip}


def test_companions_are_cut_by_the_clips_window_and_equal_in_the_store(config: Path, tmp_path: Path) -> None:
    result = make_store(config, tmp_path / "store")
    assert result.bad == 2 * 2
    run = read_run(str(config), ["--dataset.views", "2", "--dataset.latents", str(tmp_path / "store")]).value
    store, table = LatentStore.open(tmp_path / "store"), open_clips(run.dataset, run.sample_rules.columns)
    with start_world("cpu") as world:
        system = build_system(run, Mesh.create(run.parallel, world), world)
    settings = {"seed": run.seed, "stage": 0, "latent": store.encoders.latent, "rules": run.sample_rules}
    settings |= {"draws": wanted_draws(run, system.objective.draws, False), "law": run.bucket_rule}
    online, stored = SlotDataset(table, run.dataset, **settings), StoredDataset(store, table, run.dataset, **settings)
    slot = slot_of_all(run, store, tmp_path / "store")
    pixels, latents = online[slot], stored[slot]
    assert pixels.weights.tolist() == latents.weights.tolist() == [1, 0, 0, 1, 1, 1]
    places = window_draws(slot, run.seed, 0, 2)
    first = [int(place * (FRAMES - 16 + 1)) for place in places]
    for i, row in enumerate(slot.rows.tolist()):
        if not pixels.weights[i]:
            continue
        frames = read_frames(tmp_path / "clips" / f"edges{row}.mp4")[first[i] : first[i] + 16]
        assert torch.equal(pixels.companions["control"][i], torch.from_numpy(frames).permute(3, 0, 1, 2))
        wanted = [[row, frame, frame / 8] for frame in range(first[i], first[i] + 16)]
        assert pixels.companions["poses"][i].tolist() == wanted
    assert pixels.companions["object.mask"].tolist()[GOOD] == [True, False]
    assert pixels.companions["object.mask"].tolist()[THREE:] == [[True, True], [True, True], [False, False]]
    assert online.batch_bytes(slot.bucket) >= sum(value.nbytes for value in pixels.companions.values())
    for made, reason in ((pixels, "{}"), (latents, "latent store: {}")):
        reasons = {int(fault.path[0]): fault.reason for fault in made.faults}
        assert reasons[NO_POSES] == reason.format("poses: column camera names no file")
        assert reasons[SHORT].startswith(reason.format("control: "))
    nothing, weights = system.embed_nothing(), pixels.weights
    (_, told), (_, known) = (
        clean_example(system, batch, nothing, weights).noised(system) for batch in (pixels, latents)
    )
    mean = system.autoencoder.posterior(online_unit(pixels.companions["control"]))["mean"]
    good = weights > 0
    assert torch.equal(told["control"][good], mean[good])
    assert told["object"].shape == (COUNT, 2, *store.encoders.latent(1, *slot.bucket.shape[1:]))
    for name in ("control", "camera", "object"):
        assert torch.equal(told[name][good], known[name][good]), name
    assert torch.equal(told.masks["object"][good], known.masks["object"][good])


def online_unit(video: torch.Tensor) -> torch.Tensor:
    return video.float() / 127.5 - 1


def test_more_stills_than_may_be_are_drawn_for_the_view(config: Path) -> None:
    run = read_run(str(config), ["--dataset.views", "3"]).value
    table = open_clips(run.dataset, run.sample_rules.columns)
    made = SlotDataset(table, run.dataset, seed=7, stage=0, latent=run.ae.latent, rules=run.sample_rules)
    bucket = run.bucket_rule.buckets[0]
    ids, ones = table.clip_ids[[THREE]], np.ones(1, np.float32)
    passes = [made[Slot(bucket, number, np.array([THREE]), ids, ids, ones)] for number in range(6)]
    chosen = [batch.companions["object"] for batch in passes]
    assert all(torch.equal(chosen[number], chosen[number + 3]) for number in range(3))
    assert not all(torch.equal(chosen[0], other) for other in chosen[1:3])
    assert not torch.equal(chosen[0][0, 0], chosen[0][0, 1])


def test_a_table_without_the_column_is_refused_and_a_random_posterior_has_numbers_of_its_own(config: Path) -> None:
    run = read_run(str(config)).value
    with pytest.raises(UserError, match=r"clips\.parquet: has no column depth, .* edges"):
        open_clips(run.dataset, ["depth"])
    draws = wanted_draws(run, {}, posterior=True)
    assert draws["posterior.control"].purpose not in set(Purpose) - {Purpose.COMPANION_POSTERIOR}
    assert "posterior.control" not in wanted_draws(run, {}, posterior=False)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("h\n1 2 3\n4 5\n", "line 1 has 2 numbers; 3 are needed"),
        ("h\n1 2 3\n", "line 1 was asked for, but the file has 1 for frames"),
        ("h\n1 2 3\n4 x 6\n", "line 1 holds something other than numbers"),
        ("h\n1 2 3\n4 nan 6\n", "a number is not finite"),
        (b"\xff\xfe\x00", "cannot be read as text"),
        (None, "no such file"),
    ],
)
def test_poses_that_are_none_are_answered_with_the_reason(
    tmp_path: Path, text: str | bytes | None, reason: str
) -> None:
    if text is not None:
        (tmp_path / "poses.txt").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ClipError, match=reason):
        read_frame_numbers(tmp_path / "poses.txt", np.arange(2), 3, header=1)


def test_the_size_of_a_store_is_told_with_what_clips_bring_along(config: Path, tmp_path: Path) -> None:
    make_store(config, tmp_path / "store")
    run = read_run(str(config), ["--dataset.views", "2"]).value
    table = open_clips(run.dataset, run.sample_rules.columns)
    told = store_size(run, run.dataset, run.bucket_rule, 0, table)
    written = sum(path.stat().st_size for path in (tmp_path / "store" / "latents").glob("*.safetensors"))
    bad = LatentStore.open(tmp_path / "store").column("shard") < 0
    assert told.latent_bytes * np.mean(~bad) == pytest.approx(written, rel=0.02)
