"""Whatever is damaged in a store, `--verify` finds it and names the remedy, and `--mend` makes the same bytes again."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from longtake.contracts import UserError
from longtake.encode.verify import verify_store
from tests.encode.stores import contents, make_store, open_table
from tests.train.runs import assert_one_sentence, run_command, write_config

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, clips: Path) -> Path:
    """A store in one view, in small shards. Nobody changes it."""
    folder = tmp_path_factory.mktemp("store")
    make_store(write_config(folder, clips), folder / "store", views=1)
    return folder / "store"


@pytest.fixture
def damaged(store: Path, tmp_path: Path) -> Path:
    """A copy, for a test to damage."""
    return Path(shutil.copytree(store, tmp_path / "store"))


def flip(path: Path, share: float = 1.0) -> None:
    """Flips a bit of a byte: the last one, or the one at a share of the file."""
    data = bytearray(path.read_bytes())
    data[min(len(data) - 1, int(share * len(data)))] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("name", "damage", "shards"),
    [
        ("latents/000001.safetensors", flip, 1),
        ("latents/000001.safetensors", cut, 1),
        ("latents/000001.safetensors", Path.unlink, 1),
        ("texts/000000.safetensors", flip, 1),
        ("latents/000002.parquet", cut, 1),
        ("texts/000000.parquet", cut, 1),
        ("index.arrow", cut, 0),
        ("texts.arrow", cut, 0),
        ("index.parquet", cut, 0),
        ("index.arrow", lambda path: flip(path, 0.5), 0),
        ("plan.arrow", cut, 0),
        ("plan.arrow", lambda path: flip(path, 0.5), 0),
        ("empty.safetensors", flip, 0),
    ],
)
def test_damage_is_found_and_mended(
    config: Path, store: Path, damaged: Path, name: str, damage: Callable[[Path], object], shards: int
) -> None:
    damage(damaged / name)
    found = verify_store(damaged, open_table(config))
    assert found.damaged
    assert len(found.shards) == shards
    assert any(Path(name).stem in sentence for sentence in found.damaged)
    result = make_store(config, damaged, views=1, mend=found)
    assert result.continued >= (result.num_entries + result.num_texts if not shards else 1)
    assert contents(damaged) == contents(store)
    assert (damaged / "plan.arrow").read_bytes() == (store / "plan.arrow").read_bytes()
    again = verify_store(damaged, open_table(config))
    assert (again.damaged, again.is_damaged, again.complete) == ([], False, True)


def test_the_commands_lead_from_the_damage_to_a_whole_store(config: Path, store: Path, damaged: Path, capsys: Capture):
    flip(damaged / "latents" / "000000.safetensors")
    words = ("data", "encode", config, "--dataset.views", 1, "-o", damaged, "--shard-mb", 0.1)
    code, out, _ = run_command(capsys, (*words, "--verify"))
    assert code == 1
    assert "to make again 1 shard, the index: `longtake data encode RUN -o " in out.replace("\n", " ")
    assert "--mend`" in out
    code, out, _ = run_command(capsys, (*words, "--mend"))
    assert code == 0
    assert "of latents/000000.safetensors has another checksum" in out
    assert "1 damaged; to make again: 1 shard, the index" in out
    assert run_command(capsys, (*words, "--verify"))[0] == 0
    assert contents(damaged) == contents(store)
    code, out, _ = run_command(capsys, (*words, "--mend"))
    assert "0 damaged; nothing to mend" in out
    for other in (("--part", "1/2"), ("--verify",)):
        code, _, error = run_command(capsys, (*words, "--mend", *other))
        assert_one_sentence(code, error, "one command mends the whole store")


@pytest.mark.parametrize("name", ["plan.arrow", "latents/000002.parquet"])
def test_encoding_on_into_a_damaged_store_is_one_sentence(config: Path, damaged: Path, name: str, capsys: Capture):
    cut(damaged / name)
    (damaged / "index.arrow").unlink()
    words = ("data", "encode", config, "--dataset.views", 1, "-o", damaged, "--shard-mb", 0.1)
    for more in ((), ("--retry-bad",)):
        code, _, error = run_command(capsys, (*words, *more))
        assert_one_sentence(code, error, f"{name}: cannot be read (")
        assert "--mend`" in error


def test_a_run_of_other_settings_mends_nothing(config: Path, damaged: Path) -> None:
    flip(damaged / "latents" / "000000.safetensors")
    found = verify_store(damaged, open_table(config))
    with pytest.raises(UserError, match="seed is 8 here and 7 in the store"):
        make_store(config, damaged, "--seed", "8", views=1, mend=found)
    assert (damaged / "latents" / "000000.safetensors").exists()
    assert (damaged / "index.arrow").exists()


def test_a_clip_of_another_size_is_encoded_again(tmp_path: Path, clips: Path) -> None:
    shutil.copytree(clips.parent / "clips", tmp_path / "clips")
    shutil.copy(clips, tmp_path)
    config = write_config(tmp_path, tmp_path / "clips.parquet")
    make_store(config, tmp_path / "store")
    with open(tmp_path / "clips" / "clip_00002.mp4", "ab") as file:
        file.write(b"more")
    found = verify_store(tmp_path / "store", open_table(config))
    assert found.changed == ["clips/clip_00002.mp4 has changed since it was encoded: its size is another"]
    assert len(found.shards) == 2  # one of each view
    make_store(config, tmp_path / "store", mend=found)
    assert verify_store(tmp_path / "store", open_table(config)).changed == []


def test_a_plan_is_not_made_again_from_other_captions(tmp_path: Path, clips: Path) -> None:
    path = clips.parent / "for_mend.parquet"
    table = pq.read_table(clips)
    pq.write_table(table, path)
    config = write_config(tmp_path, path)
    make_store(config, tmp_path / "store", views=1)
    cut(tmp_path / "store" / "plan.arrow")
    texts = ["other words"] * len(table)
    pq.write_table(table.set_column(table.column_names.index("text"), "text", [texts]), path)
    found = verify_store(tmp_path / "store", open_table(config))
    with pytest.raises(UserError, match=r"plan\.arrow: is damaged, and cannot be made again: the captions"):
        make_store(config, tmp_path / "store", views=1, mend=found)
