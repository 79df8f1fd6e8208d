"""Making a store: the same bytes however the work is split or interrupted; bad clips cost themselves."""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from longtake.buckets.assignment import BucketRule
from longtake.contracts import Batch, Slot, UserError
from longtake.data.latents.dataset import StoredDataset
from longtake.data.latents.store import LatentStore, text_hash
from longtake.data.loading.dataset import SlotDataset
from longtake.encode import run
from longtake.encode.plan import encode_inputs, make_plan
from longtake.encode.shards import in_use
from longtake.encode.verify import whole_files
from longtake.encoders.pixel import PixelAutoencoder
from longtake.encoders.word_vectors import WordEncoder
from longtake.system.encoders import build_encoders
from longtake.train.run_file import read_run
from tests.data.made_clips import DRAWS
from tests.encode.stores import contents, make_store, open_table
from tests.train.runs import finish, kill, start, wait_until, write_config


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, clips: Path) -> Path:
    """A store made by one process in one go. Nobody changes it."""
    folder = tmp_path_factory.mktemp("store")
    make_store(write_config(folder, clips), folder / "store")
    return folder / "store"


def test_stopped_worker_is_replaced_and_changes_nothing_of_the_store(
    config: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop_once(dataset: SlotDataset, slot: Slot) -> Batch:
        with suppress(FileExistsError):
            (tmp_path / "stopped").touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGSTOP)
        return read(dataset, slot)

    read = SlotDataset.__getitem__
    monkeypatch.setattr(SlotDataset, "__getitem__", stop_once)
    make_store(config, tmp_path / "store", "--dataset.timeout-seconds", "0.5", num_workers=1)
    assert (tmp_path / "stopped").exists()
    assert contents(tmp_path / "store") == contents(store)
    assert "was killed after 0.5 s without running" in capsys.readouterr().out


def test_every_view_of_every_sample_is_there_once_and_every_caption_once(config: Path, store: Path) -> None:
    opened, table = LatentStore.open(store), open_table(config)
    assert len(opened) == 2 * len(table)
    for view in range(2):
        entries = opened.find(view, table.clip_ids)
        assert sorted(entries) == list(range(view * len(table), (view + 1) * len(table)))
    texts = pq.read_table(store / "texts.parquet")
    assert len(set(texts["caption"].to_pylist())) == len(texts) < len(table) + 1
    assert texts["text"].to_pylist() == sorted(text_hash(caption) for caption in texts["caption"].to_pylist())
    assert set(opened.column("text").tolist()) == set(texts["text"].to_pylist())


def test_a_disk_without_room_for_the_store_is_told_before_it_is_full(
    config: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    needed = sum(path.stat().st_size for path in store.rglob("*.safetensors"))
    for free, is_told in ((needed * 1.1, False), (needed * 0.9, True)):
        room = shutil.disk_usage(tmp_path)._replace(free=int(free))
        monkeypatch.setattr(shutil, "disk_usage", lambda path, room=room: room)
        make_store(config, tmp_path / f"store{free}")
        said = capfd.readouterr().err
        assert ("GB are free there, and what is to be encoded needs" in said) == is_told


def test_the_index_of_a_whole_store_is_mapped_not_read(store: Path) -> None:
    opened = LatentStore.open(store)
    assert opened.complete
    for name in ("sample", "text", "crc"):
        assert not opened.column(name).flags.owndata
        assert not opened.column(name).flags.writeable


def test_an_entry_is_what_the_encoders_make_of_its_view(config: Path, store: Path) -> None:
    run = read_run(str(config), ["--dataset.views", "2", "--dataset.latents", str(store)]).value
    table, opened = open_table(config), LatentStore.open(store)
    encoders = build_encoders(run, torch.device("cpu"))
    settings = {"seed": run.seed, "stage": 0, "latent": opened.encoders.latent, "draws": DRAWS}
    online = SlotDataset(table, run.dataset, **settings)
    stored = StoredDataset(opened, table, run.dataset, **settings)
    rule = BucketRule.from_config(run.bucket_config, run.size_divisor, run.dataset.fps_max)
    inputs = encode_inputs(run.seed, run.dataset, rule, table, 0)
    plan = make_plan(inputs, online.texts)
    for entry in (0, 7, len(plan) - 1):
        (slot,) = plan.slots(inputs.rule, entry, entry + 1)
        pixels, latents = online[slot], stored[slot]
        assert torch.equal(latents.encoded["mean"], encoders.posterior(pixels.video)["mean"])
        assert torch.equal(latents.encoded["text"], encoders.embed(pixels.text)["text"])
        assert torch.equal(latents.encoded["vector"], encoders.embed(pixels.text)["vector"])
        assert torch.equal(latents.draws["noise"], pixels.draws["noise"])
        assert latents.text == pixels.text
    assert torch.equal(opened.encoders.empty["text"], encoders.embed([""])["text"])


def test_each_clip_is_encoded_once_a_view_and_each_caption_once(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    videos, captions = [], []
    encode_video, encode_text = PixelAutoencoder.posterior, WordEncoder.encode

    def count_video(self: PixelAutoencoder, video: torch.Tensor) -> dict[str, torch.Tensor]:
        videos.append(len(video))
        return encode_video(self, video)

    def count_text(self: WordEncoder, texts: tuple[str, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        captions.extend(texts)
        return encode_text(self, texts)

    monkeypatch.setattr(PixelAutoencoder, "posterior", count_video)
    monkeypatch.setattr(WordEncoder, "encode", count_text)
    result = make_store(config, tmp_path / "store")
    assert sum(videos[1:]) == result.num_entries  # the first call asks for shapes
    named = [caption for caption in captions if caption]
    assert len(named) == 2 * result.num_texts  # token sequence and pooled vector
    assert len(set(named)) == result.num_texts


def test_parts_make_the_same_bytes_as_one_process(config: Path, tmp_path: Path, store: Path) -> None:
    for number in (3, 1):
        result = make_store(config, tmp_path / "parts", part=(number, 3))
        assert result.missing > 0
    assert make_store(config, tmp_path / "parts", part=(2, 3)).missing == 0
    assert contents(tmp_path / "parts") == contents(store)


def test_a_shard_that_has_lost_its_end_is_named(config: Path, tmp_path: Path) -> None:
    make_store(config, tmp_path / "store")
    path = tmp_path / "store" / "latents" / "000001.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"latents/000001.safetensors is cut short .*; .* --mend"):
        LatentStore.open(tmp_path / "store")


def test_an_interruption_costs_the_shard_under_way(config: Path, tmp_path: Path, store: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    folder = tmp_path / "store"
    with pytest.raises(KeyboardInterrupt):
        make_store(config, folder, progress=interrupt)
    assert not (folder / "index.arrow").exists()
    times = {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}
    result = make_store(config, folder)
    assert 0 < result.continued < result.num_entries + result.num_texts
    assert times == {path: path.stat().st_mtime_ns for path in times}
    assert contents(folder) == contents(store)
    assert not list(folder.rglob("*.partial*"))
    assert make_store(config, folder).continued == result.num_entries + result.num_texts


def test_a_half_written_shard_is_never_read(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_disk(path: object, content: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr("longtake.data.latents.shard.write_whole", out_of_disk)
        with pytest.raises(OSError, match="No space left"):
            make_store(config, tmp_path / "store")
    assert not list((tmp_path / "store").rglob("0*"))
    assert make_store(config, tmp_path / "store").continued == 0


@pytest.mark.slow
def test_two_processes_and_one_that_is_killed_make_the_same_bytes(config: Path, tmp_path: Path, store: Path) -> None:
    words = ("data", "encode", config, "--dataset.views", 2, "--shard-mb", 0.1, "-o", tmp_path / "store")
    process = start(*words)
    wait_until(process, lambda: len(list(tmp_path.glob("store/latents/*.parquet"))) > 2)
    kill(process)
    code, out, error = finish(start(*words, processes=2))
    assert code == 0, error
    assert "80 samples in 2 views" in out
    assert contents(tmp_path / "store") == contents(store)


@pytest.mark.slow
def test_ctrl_c_says_how_far_it_came(config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    words = ("data", "encode", config, "--dataset.views", 40, "--shard-mb", 0.1, "-o", folder, "--num_workers", 1)
    process = start(*words)
    wait_until(process, lambda: len(list(folder.glob("latents/*.parquet"))) > 2)
    process.send_signal(signal.SIGINT)
    code, _, error = finish(process)
    assert code == 130
    assert "samples and captions are encoded; the same command continues from there" in error
    assert "Traceback" not in error


def test_a_bad_clip_is_listed_with_its_reason_and_can_be_tried_again(tmp_path: Path, clips: Path) -> None:
    shutil.copytree(clips.parent / "clips", tmp_path / "clips")
    shutil.copy(clips, tmp_path)
    bad = tmp_path / "clips" / "clip_00003.mp4"
    bad.rename(tmp_path / "aside.mp4")
    config = write_config(tmp_path, tmp_path / "clips.parquet")
    assert make_store(config, tmp_path / "store").bad == 2
    lines = (tmp_path / "store" / "bad.csv").read_text().splitlines()
    assert len(lines) == 3
    assert '"clips/clip_00003.mp4",0,' in lines[1]
    assert make_store(config, tmp_path / "store").bad == 2  # kept as it is
    (tmp_path / "aside.mp4").rename(bad)
    result = make_store(config, tmp_path / "store", retry_bad=True)
    assert result.bad == 0
    assert 0 < result.continued < result.num_entries + result.num_texts
    assert not (tmp_path / "store" / "bad.csv").exists()


def test_a_wrong_root_is_said_and_can_be_put_right(config: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"dataset.root: none of the first \d+ clips can be read"):
        make_store(config, tmp_path / "store", "--dataset.root", str(tmp_path))
    result = make_store(config, tmp_path / "store")
    assert result.bad == 0


def test_a_run_without_a_number_of_views_is_refused(config: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"dataset\.views = 0"):
        make_store(config, tmp_path / "store", views=0)
    assert not (tmp_path / "store").exists()


def test_a_folder_with_another_store_is_left_alone(config: Path, store: Path) -> None:
    before = contents(store)
    for change, said in (
        (("--seed", "8"), "seed is 8 here and 7 in the store"),
        (("--ae.scaling_factor", "2.0"), "ae.scaling_factor is 2.0 here and 1.0"),
    ):
        with pytest.raises(UserError) as refused:
            make_store(config, store, *change)
        assert said in str(refused.value)
    with pytest.raises(UserError, match='dtype is "bf16" here and null'):
        make_store(config, store, dtype="bf16")
    with pytest.raises(UserError, match="shard_bytes is 5 here and 100000"):
        make_store(config, store, shard_bytes=5)
    assert contents(store) == before


def test_a_caption_that_changes_under_way_is_refused(tmp_path: Path, clips: Path) -> None:
    table = pq.read_table(clips)
    path = clips.parent / "for_captions.parquet"
    pq.write_table(table, path)
    config = write_config(tmp_path, path)
    make_store(config, tmp_path / "store", part=(1, 2))
    texts = np.array(table["text"].to_pylist(), object)
    texts[:] = "other words"
    pq.write_table(table.set_column(table.column_names.index("text"), "text", [texts.tolist()]), path)
    with pytest.raises(UserError, match=r"'other words.*' now, which is not the one that the store was begun with"):
        make_store(config, tmp_path / "store", part=(2, 2))


def test_the_list_of_bad_clips_is_there_before_the_index(
    tmp_path: Path, clips: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(clips.parent / "clips", tmp_path / "clips")
    shutil.copy(clips, tmp_path)
    (tmp_path / "clips" / "clip_00003.mp4").unlink()
    config = write_config(tmp_path, tmp_path / "clips.parquet")
    write = run.write_index

    def die(table: object, path: Path) -> None:
        if path.parent == tmp_path / "store":
            raise KeyboardInterrupt
        write(table, path)

    with monkeypatch.context() as broken:
        broken.setattr("longtake.encode.run.write_index", die)
        with pytest.raises(KeyboardInterrupt):
            make_store(config, tmp_path / "store")
    assert "clips/clip_00003.mp4" in (tmp_path / "store" / "bad.csv").read_text()
    assert make_store(config, tmp_path / "store").bad == 2


def test_bad_clips_that_stay_bad_can_be_tried_again(tmp_path: Path, clips: Path) -> None:
    shutil.copytree(clips.parent / "clips", tmp_path / "clips")
    shutil.copy(clips, tmp_path)
    (tmp_path / "clips" / "clip_00003.mp4").unlink()
    config = write_config(tmp_path, tmp_path / "clips.parquet")
    made = make_store(config, tmp_path / "store", shard_bytes=1)  # a shard an entry
    again = make_store(config, tmp_path / "store", shard_bytes=1, retry_bad=True)
    assert made.bad == again.bad == 2
    assert again.continued == again.num_entries + again.num_texts - 2


def test_all_files_follow_the_umask_and_those_of_living_writers_stay(config: Path, tmp_path: Path) -> None:
    before = os.umask(0o007)
    try:
        make_store(config, tmp_path / "store", part=(1, 2))
        partial = tmp_path / "store" / "latents" / ".999999.1-ab.partial.safetensors"
        partial.touch()
        with in_use(tmp_path / "store"):  # by another process
            make_store(config, tmp_path / "store", part=(2, 2))
            assert partial.exists()
        for whole in whole_files(tmp_path / "store"):
            whole.unlink()
        make_store(config, tmp_path / "store", part=(2, 2))
        assert not partial.exists()
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".arrow", ".parquet", ".safetensors"}
    assert {path.stat().st_mode & 0o777 for path in files} == {0o660}


@pytest.mark.parametrize("wanted", [False, True])
def test_a_store_is_encoded_in_tf32_where_a_run_would_be(config: Path, tmp_path: Path, wanted: bool) -> None:
    """PyTorch's own default differs between convolutions and products, and an earlier run in this process may have set
    either."""
    flags = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [flag.allow_tf32 for flag in flags]
    try:
        for flag in flags:
            flag.allow_tf32 = not wanted
        make_store(config, tmp_path / "store", "--tf32", str(wanted), views=1)
        assert [flag.allow_tf32 for flag in flags] == [wanted, wanted]
    finally:
        for flag, was in zip(flags, before, strict=True):
            flag.allow_tf32 = was
