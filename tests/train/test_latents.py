"""Training from a latent store: the losses are those of the encoders, and none of these is built."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from longtake.contracts import UserError
from longtake.data.latents.store import INDEX_NAMES
from longtake.data.loading.quarantine import read_quarantine
from longtake.encoders.pixel import PixelAutoencoder
from longtake.encoders.word_vectors import WordEncoder
from tests.train.runs import assert_one_sentence, exact, finish, run_command, start, train_here, write_config

VIEWS = ("--dataset.views", "2")
Losses = list[tuple[int, str, str]]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, clips: Path) -> Path:
    """The store of the tiny run's clips in two views, in small shards. Nobody changes it."""
    folder = tmp_path_factory.mktemp("store")
    encode(write_config(folder, clips), folder / "store")
    return folder / "store"


@pytest.fixture(scope="module")
def with_encoders(tmp_path_factory: pytest.TempPathFactory, clips: Path) -> Callable[..., Losses]:
    """Ten steps, in three passes, of the tiny run with its encoders and some overrides: a view comes again."""

    @cache
    def with_encoders(*words: str) -> Losses:
        config = write_config(tmp_path_factory.mktemp("online"), clips)
        return exact(train(config, "online", None, "--max_steps", "10", *words)[0].folder)

    return with_encoders


@pytest.fixture(scope="module")
def online(with_encoders: Callable[..., Losses]) -> Losses:
    return with_encoders()


def encode(config: Path, store: Path, *words: object) -> None:
    """`longtake data encode` in this process, on one thread; it must go well."""
    from longtake.cli import main

    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in ("data", "encode", config, *VIEWS, "-o", store, "--shard-mb", 0.1, *words)])
    assert ended.value.code == 0


def train(config: Path, name: str, store: Path | None, *words: str) -> tuple[Any, str]:
    latents = () if store is None else ("--dataset.latents", str(store))
    return train_here(config, *VIEWS, "--exp_name", name, *latents, *words)


@pytest.mark.parametrize("workers", ["0", "2"])
def test_the_losses_are_those_of_the_encoders_bit_by_bit(
    config: Path, store: Path, online: Losses, workers: str
) -> None:
    stored, said = train(config, "stored", store, "--max_steps", "10", "--num_workers", workers)
    assert "no encoder is loaded" in said
    assert len(online) == 10
    assert exact(stored.folder) == online


def test_auto_makes_a_small_store_first_and_trains_online_from_a_large_one(
    tmp_path: Path, clips: Path, online: Losses
) -> None:
    table = shutil.copy(clips, tmp_path / "clips.parquet")
    config = write_config(tmp_path, clips, dataset={"data_path": str(table), "root": str(clips.parent)})
    words = ("--dataset.latents", "auto", "--max_steps", "4")
    large, said = train(config, "large", None, *words, "--dataset.latents_max_gb", "0")
    assert "the run encodes by itself" in said
    small, said = train(config, "small", None, *words)
    assert "are encoded first" in said
    assert "no encoder is loaded" in said
    assert exact(small.folder) == exact(large.folder) == online[:4]
    _, said = train_here(small.folder, "--max_steps", "5")
    assert "'auto'" not in said
    assert exact(small.folder) == online[:5]


def test_auto_goes_on_with_a_begun_store_and_leaves_one_of_something_else(
    tmp_path: Path, clips: Path, online: Losses, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, folder = shutil.copy(clips, tmp_path / "clips.parquet"), tmp_path / "clips.latents"
    config = write_config(tmp_path, clips, dataset={"data_path": str(table), "root": str(clips.parent)})
    encode(config, folder)
    written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    index = (folder / f"{name}.arrow" for name in INDEX_NAMES.values())
    for path in (*index, *folder.glob("latents/000001.*")):  # an interruption left these out
        path.unlink()
    monkeypatch.setattr("longtake.encode.auto.shutil.disk_usage", lambda folder: SimpleNamespace(free=written))
    words = ("--dataset.latents", "auto", "--max_steps", "2")
    begun, said = train(config, "begun", None, *words)
    assert "are encoded first" in said
    assert "no encoder is loaded" in said
    assert exact(begun.folder) == online[:2]
    other, said = train(config, "other", None, *words, "--seed", "8")
    assert "something else (seed is 8 here and 7 in the store), so the run encodes by itself" in said
    assert len(exact(other.folder)) == 2


def test_a_launch_that_goes_on_with_auto_keeps_what_the_run_was_started_with(
    tmp_path: Path, clips: Path, online: Losses
) -> None:
    table = shutil.copy(clips, tmp_path / "clips.parquet")
    config = write_config(tmp_path, clips, dataset={"data_path": str(table), "root": str(clips.parent)})

    def launch(name: str, steps: int, *words: str) -> tuple[Path, str]:
        own = ("--dataset.latents", "auto", "--resume", "auto", "--max_steps", str(steps))
        outcome, said = train(config, name, None, *own, *words)
        return outcome.folder, said

    large, _ = launch("large", 2, "--dataset.latents_max_gb", "0")
    assert "the run encodes by itself, as this run was started" in launch("large", 4)[1]  # though there is room now
    assert not (tmp_path / "clips.latents").exists()
    small, _ = launch("small", 2)
    _, said = launch("small", 4, "--dataset.latents_max_gb", "0")
    assert "they are in" in said
    assert "no encoder is loaded" in said
    shutil.rmtree(tmp_path / "clips.latents")
    _, said = launch("small", 6, "--dataset.latents_max_gb", "0")
    assert "clips.latents, the store that this run was started with, is gone" in said
    assert "so the run encodes by itself" in said
    assert exact(large) == online[:4]
    assert exact(small) == online[:6]


def test_a_run_goes_on_from_the_store_and_back_to_the_encoders(config: Path, store: Path, online: Losses) -> None:
    begun, _ = train(config, "begun", store, "--max_steps", "3")
    train_here(begun.folder, "--max_steps", "5")
    train_here(begun.folder, "--max_steps", "8", "--dataset.latents", "None")
    assert exact(begun.folder) == online[:8]


def test_neither_autoencoder_nor_text_encoder_is_built(
    config: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("an encoder was built")

    monkeypatch.setattr(PixelAutoencoder, "__init__", refuse)
    monkeypatch.setattr(WordEncoder, "__init__", refuse)
    with pytest.raises(AssertionError, match="an encoder was built"):
        train(config, "online", None, "--max_steps", "1")
    train(config, "stored", store, "--max_steps", "1")


def test_weights_in_a_mix_and_captions_from_two_columns(tmp_path: Path, clips: Path) -> None:
    table = pq.read_table(clips)
    table = table.append_column("short", pa.array(["a shape"] * len(table)))
    pq.write_table(table.slice(0, 20), tmp_path / "first.parquet")
    pq.write_table(table.slice(20), tmp_path / "second.parquet")
    dataset = {
        "mix": [(str(tmp_path / "first.parquet"), 1.5), (str(tmp_path / "second.parquet"), 0.5)],
        "root": str(clips.parent),
        "captions": {"text": 0.5, "short": 0.5},
    }
    config = write_config(tmp_path, clips, dataset=dataset, max_steps=12)
    encode(config, tmp_path / "store")
    online, _ = train(config, "online", None)
    stored, _ = train(config, "stored", tmp_path / "store")
    assert exact(stored.folder)[-1][0] == 12  # passes 2 and 3 draw copies that passes 0 and 1 did not
    assert exact(stored.folder) == exact(online.folder)


def test_a_clip_that_could_not_be_read_is_left_out_as_in_training(tmp_path: Path, clips: Path) -> None:
    for file in clips.parent.glob("clips/*"):
        shutil.copy(file, tmp_path)
    names = pc.replace_substring(pq.read_table(clips)["path"], "clips/", "")
    table = pq.read_table(clips).set_column(0, "path", names)
    pq.write_table(table, tmp_path / "clips.parquet")
    (tmp_path / names[3].as_py()).write_bytes(b"no video")
    config = write_config(tmp_path, tmp_path / "clips.parquet", max_steps=9)
    encode(config, tmp_path / "store")
    assert names[3].as_py() in (tmp_path / "store" / "bad.csv").read_text()
    online, _ = train(config, "online", None)
    stored, said = train(config, "stored", tmp_path / "store")
    assert f"left out {names[3].as_py()}: latent store: " in said
    assert exact(stored.folder) == exact(online.folder)
    quarantined = [read_quarantine(run.folder / "quarantine.jsonl") for run in (online, stored)]
    assert len(quarantined[0]) == 1
    assert quarantined[0] == quarantined[1]


KNOWN = ("--model.cond_embed", "True", "--condition_config.t2v", "1", "--condition_config.i2v_head", "2")
LOOP = (*KNOWN, "--condition_config.i2v_loop", "1")


@pytest.fixture(scope="module")
def store_of_windows(tmp_path_factory: pytest.TempPathFactory, clips: Path) -> Path:
    """As `store`, with the first and the last frame of each clip that has two latent frames."""
    folder = tmp_path_factory.mktemp("windows")
    encode(write_config(folder, clips), folder / "store", *LOOP)
    return folder / "store"


@pytest.mark.parametrize(
    ("workers", "words"),
    [pytest.param("2", KNOWN, id="some of its kinds, by workers"), pytest.param("0", LOOP, id="all of its kinds")],
)
def test_with_known_frames_the_losses_are_those_of_the_encoders_bit_by_bit(
    config: Path, store_of_windows: Path, workers: str, words: tuple[str, ...], with_encoders: Callable[..., Losses]
) -> None:
    stored, said = train(config, "stored", store_of_windows, *words, "--max_steps", "10", "--num_workers", workers)
    assert "no encoder is loaded" in said
    assert exact(stored.folder) == with_encoders(*words)
    assert exact(stored.folder) != with_encoders("--model.cond_embed", "True")


def test_a_store_with_known_frames_trains_a_run_without_them(
    config: Path, store_of_windows: Path, online: Losses
) -> None:
    stored, _ = train(config, "stored", store_of_windows, "--max_steps", "10")
    assert exact(stored.folder) == online


def test_kinds_that_a_store_has_not_are_named_with_the_command(
    config: Path, store: Path, store_of_windows: Path
) -> None:
    with pytest.raises(UserError, match=r"asks for i2v_head, i2v_loop, whose .* whole clips only; run `longtake data"):
        train(config, "refused", store, *LOOP)
    only_head = config.parent / "head"
    encode(config, only_head, *KNOWN)
    with pytest.raises(UserError, match=r"asks for i2v_loop, .* the store holds that of i2v_head only; run `longtake"):
        train(config, "refused", only_head, *LOOP)
    assert not (config.parent / "outputs" / "refused").exists()


def test_what_is_missing_is_encoded_online_with_its_known_frames(
    config: Path, tmp_path: Path, with_encoders: Callable[..., Losses]
) -> None:
    encode(config, tmp_path / "part", "--part", "1/2", *LOOP)
    mixed, said = train(config, "mixed", tmp_path / "part", *LOOP, "--dataset.latents_missing", "online")
    assert "of them are missing and encoded here" in said
    assert exact(mixed.folder) == with_encoders(*LOOP)[:8]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--seed", "8"), "seed is 8 here and 7 in the store"),
        (("--dataset.views", "3"), "dataset.views is 3 here and 2 in the store"),
        (("--dataset.fps_max", "4"), "dataset.fps_max is 4.0 here and 24.0 in the store"),
        (("--dataset.vmaf", "False"), "dataset.vmaf is false here and true in the store"),
        (("--compat", "opensora_v2"), 'compat is "opensora_v2" here and null in the store'),
        (("--ae.scaling_factor", "2.0"), "ae.scaling_factor is 2.0 here and 1.0 in the store"),
        (("--t5.max_length", "9"), "t5.max_length is 9 here and 8 in the store"),
        (("--bucket_config.32px.8", "(0.5, 3)"), "bucket_config.32px.8 is 0.5 here and 1.0 in the store"),
        (("--dataset.captions", "{'text': 2}"), 'dataset.captions is [["text", 2.0]] here and [["text", 1.0]] in'),
    ],
)
def test_a_store_of_other_settings_is_refused_with_both_values(
    config: Path, store: Path, words: tuple[str, ...], said: str
) -> None:
    with pytest.raises(UserError) as refused:
        train(config, "refused", store, *words)
    assert said in str(refused.value)
    assert not (config.parent / "outputs" / "refused").exists()


def test_another_batch_size_is_no_other_setting(config: Path, store: Path) -> None:
    train(config, "larger", store, "--max_steps", "1", "--bucket_config.32px.8", "(1.0, 5)")


def test_clips_and_captions_of_another_table_are_refused(tmp_path: Path, clips: Path, store: Path) -> None:
    table = pq.read_table(clips).drop_columns(["clip_id"])
    for name, column, value, said in (
        ("frames", "num_frames", 33, "num_frames of clips/clip_00000.mp4 is 33 in the clip table and"),
        ("text", "text", "another text", "the caption of clips/clip_00000.mp4 is 'another text. 8 FPS.' now"),
    ):
        values = table[column].to_pylist()
        place = table.column_names.index(column)
        path = clips.parent / f"changed_{name}.parquet"
        pq.write_table(table.set_column(place, column, pa.array([value, *values[1:]])), path)
        config = write_config(tmp_path / name, path)
        with pytest.raises(UserError, match=r"dataset\.latents") as refused:
            train(config, name, store)
        assert said in str(refused.value)


def test_samples_that_are_missing_are_refused_with_their_count_or_encoded_online(
    config: Path, tmp_path: Path, online: Losses
) -> None:
    encode(config, tmp_path / "part", "--part", "1/2")
    with pytest.raises(UserError, match=r"\d+ of the 80 samples that the run asks for are not in it"):
        train(config, "refused", tmp_path / "part")
    mixed, said = train(config, "mixed", tmp_path / "part", "--dataset.latents_missing", "online")
    assert "of them are missing and encoded here" in said
    assert exact(mixed.folder) == online[:8]


def test_samples_whose_caption_is_missing_are_missing(config: Path, tmp_path: Path, online: Losses) -> None:
    encode(config, tmp_path / "part", "--part", "1/2", "--shard-mb", "0.002")
    for path in tmp_path.glob("part/latents/*.parquet"):  # the latents are all there, the captions are not
        path.unlink()
    captions = pq.read_table(sorted(tmp_path.glob("part/texts/*.parquet")))
    encode(config, tmp_path / "whole", "--shard-mb", "0.002")
    for path in (tmp_path / "whole").glob("*.arrow"):
        path.unlink()
    shutil.rmtree(tmp_path / "whole" / "texts")
    shutil.copytree(tmp_path / "part" / "texts", tmp_path / "whole" / "texts")
    index = pq.read_table(sorted(tmp_path.glob("whole/latents/*.parquet")))
    missing = pc.sum(pc.invert(pc.is_in(index["text"], captions["text"].combine_chunks()))).as_py()
    assert 0 < missing < len(index) == 80
    with pytest.raises(UserError, match=f"{missing} of the 80 samples that the run asks for are not in it"):
        train(config, "refused", tmp_path / "whole")
    mixed, said = train(config, "mixed", tmp_path / "whole", "--dataset.latents_missing", "online")
    assert f"{missing} of them are missing and encoded here" in said
    assert exact(mixed.folder) == online[:8]


def test_a_store_of_other_weights_is_refused_where_encoders_are_loaded(config: Path, tmp_path: Path) -> None:
    encode(config, tmp_path / "part", "--part", "1/2")
    facts = tmp_path / "part" / "store.json"
    facts.write_text(facts.read_text().replace('"autoencoder": null', '"autoencoder": "0123456789abcdef"'))
    with pytest.raises(UserError) as refused:
        train(config, "refused", tmp_path / "part", "--dataset.latents_missing", "online")
    assert 'weights.autoencoder is null here and "0123456789abcdef" in the store' in str(refused.value)


def flip_last_byte(path: Path) -> None:
    """Other contents of equal size, which still decode: the byte is in x264's settings or a frame's end."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_clip_that_was_replaced_is_refused_and_a_copy_is_not(tmp_path: Path, clips: Path) -> None:
    shutil.copytree(clips.parent / "clips", tmp_path / "clips")
    shutil.copy(clips, tmp_path)
    config = write_config(tmp_path, tmp_path / "clips.parquet", max_steps=1)
    encode(config, tmp_path / "store")
    for file in (tmp_path / "clips").iterdir():
        os.utime(file, (1, 1))
    (tmp_path / "clips" / "clip_00001.mp4").unlink()
    train(config, "copies", tmp_path / "store")
    for name in ("clip_00002.mp4", "clip_00004.mp4"):
        with open(tmp_path / "clips" / name, "ab") as file:
            file.write(b"more")
    flip_last_byte(tmp_path / "clips" / "clip_00006.mp4")
    names = r"clips/clip_00002\.mp4, clips/clip_00004\.mp4, clips/clip_00006\.mp4"
    with pytest.raises(UserError, match=rf"3 of 39 clip files have changed since .*{names}.* --mend"):
        train(config, "refused", tmp_path / "store")
    shutil.copy(clips.parent / "clips" / "clip_00001.mp4", tmp_path / "clips")
    encode(config, tmp_path / "store", "--mend")
    train(config, "mended", tmp_path / "store")


@pytest.mark.parametrize("name", ["index.arrow", "texts.arrow", "empty.safetensors"])
def test_a_damaged_store_is_one_sentence(
    config: Path, tmp_path: Path, store: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(store, tmp_path / "store")
    path = tmp_path / "store" / name
    path.write_bytes(path.read_bytes()[:100])
    code, _, error = run_command(capsys, ["train", config, *VIEWS, "--dataset.latents", tmp_path / "store"])
    assert_one_sentence(code, error, f"{name}: cannot be read (")
    assert "--mend" in error


def test_a_folder_without_a_store_and_a_run_without_views_are_mistakes(
    config: Path, tmp_path: Path, store: Path
) -> None:
    with pytest.raises(UserError, match=r"no store.json in it"):
        train(config, "none", tmp_path)
    with pytest.raises(UserError, match=r"views = 0"):
        train_here(config, "--dataset.latents", str(store))


def test_embeddings_rounded_to_bf16_train_too(
    config: Path, tmp_path: Path, online: Losses, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["data", "encode", config, *VIEWS, "-o", tmp_path / "half", "--store-dtype", "bf16"]
    code, out, _ = run_command(capsys, words)
    assert code == 0
    assert "train with --dataset.views 2 --dataset.latents" in out
    stored, _ = train(config, "stored", tmp_path / "half", "--max_steps", "2")
    losses = [[float.fromhex(bits) for _, _, bits in lines] for lines in (online[:2], exact(stored.folder))]
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)
    assert losses[0] != losses[1]


@pytest.mark.slow
def test_two_processes_train_from_one_store(config: Path, store: Path, online: Losses) -> None:
    words = ("train", config, *VIEWS, "--exp_name", "two", "--dataset.latents", store)
    code, out, error = finish(start(*words, processes=2))
    assert code == 0, error
    assert out.count("no encoder is loaded") == 1
    found = exact(config.parent / "outputs" / "two")
    assert [line[:2] for line in found] == [line[:2] for line in online[:8]]
    losses = [[float.fromhex(bits) for _, _, bits in lines] for lines in (online[:8], found)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
