"""A store is read whole, and what is wrong with it is named."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from longtake.contracts import UserError
from longtake.data.latents.store import LatentStore
from longtake.encode import fit
from longtake.encode.fit import open_fitting_store
from longtake.encode.verify import verify_store
from longtake.train.run_file import read_run
from tests.encode.stores import ALONE, make_store, open_table
from tests.train.runs import run_command, write_config


def test_an_undamaged_store_passes(config: Path, tmp_path: Path) -> None:
    made = make_store(config, tmp_path / "store")
    found = verify_store(tmp_path / "store", open_table(config))
    assert (found.num_entries, found.num_texts, found.complete) == (made.num_entries, made.num_texts, True)
    assert (found.damaged, found.changed, found.bad) == ([], [], 0)


@pytest.mark.parametrize("kind", ["latents", "texts"])
def test_one_flipped_bit_is_found(config: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    make_store(config, tmp_path / "store")
    path = tmp_path / "store" / kind / "000000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    LatentStore.open(tmp_path / "store")  # sizes are as they should be
    words = ["data", "encode", config, "--dataset.views", 2, "-o", tmp_path / "store", "--verify"]
    code, out, _ = run_command(capsys, words)
    assert code == 1
    assert "1 damaged" in out
    assert f"of {kind}/000000.safetensors has another checksum than when written" in out


def test_a_clip_that_was_replaced_is_named(tmp_path: Path, clips: Path) -> None:
    shutil.copytree(clips.parent / "clips", tmp_path / "clips")
    shutil.copy(clips, tmp_path)
    config = write_config(tmp_path, tmp_path / "clips.parquet")
    make_store(config, tmp_path / "store")
    os.utime(tmp_path / "clips" / "clip_00001.mp4", (1, 1))  # a copy
    (tmp_path / "clips" / "clip_00004.mp4").unlink()
    assert verify_store(tmp_path / "store", open_table(config)).changed == ["clips/clip_00004.mp4 is gone"]
    path = tmp_path / "clips" / "clip_00002.mp4"
    time, data = path.stat().st_mtime_ns, path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    os.utime(path, ns=(time, time))  # nothing but the digest tells
    found = verify_store(tmp_path / "store", open_table(config))
    assert found.changed == [
        "clips/clip_00002.mp4 has changed since it was encoded: other contents of equal size",
        "clips/clip_00004.mp4 is gone",
    ]
    assert found.is_damaged


def test_of_many_files_some_are_compared_and_their_number_is_kept(
    tmp_path: Path, clips: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_config(tmp_path, clips)
    make_store(config, tmp_path / "store")
    monkeypatch.setattr(fit, "ALL_COMPARED", 5)
    monkeypatch.setattr(fit, "SOME_COMPARED", 3)
    run = read_run(str(config), ["--dataset.views", "2", "--dataset.latents", str(tmp_path / "store")]).value
    fitting = open_fitting_store(run, run.dataset, run.bucket_rule, open_table(config), 0, run.condition_config, ALONE)
    assert "3 of 40 clip files" in str(fitting)


def test_a_part_is_not_called_complete(config: Path, tmp_path: Path) -> None:
    make_store(config, tmp_path / "store", part=(1, 2))
    assert not verify_store(tmp_path / "store", open_table(config)).complete


def test_a_folder_without_a_store_and_one_of_another_format_are_refused(config: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no store\.json in it"):
        verify_store(tmp_path, open_table(config))
    make_store(config, tmp_path / "store")
    file = tmp_path / "store" / "store.json"
    file.write_text(file.read_text().replace('"longtake_format_version": 2', '"longtake_format_version": 9'))
    with pytest.raises(UserError, match="format version 9 of 'latent store' was found, version 2"):
        verify_store(tmp_path / "store", open_table(config))
