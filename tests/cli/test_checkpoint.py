from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors import safe_open

from longtake.generate.source import resolve_source
from longtake.train.run import Outcome


@pytest.fixture
def copy(run: Outcome, tmp_path: Path) -> Path:
    """A copy of the run's folder, to be damaged."""
    return shutil.copytree(run.folder, tmp_path / "outputs" / "run")


def test_checkpoints_are_listed_for_a_run_and_for_a_folder_of_runs(longtake, run: Outcome):
    for place in (run.folder, run.folder.parent):
        code, out, _ = longtake("checkpoint", "list", place)
        head, line = out.splitlines()
        assert code == 0
        assert head.split() == ["checkpoint", "pass", "step", "size", "saved", "state"]
        assert line.split()[:3] == [str(run.checkpoint), "0", "3"]
        assert line.split()[-1] == "complete"


def test_a_damaged_checkpoint_is_listed_as_such_and_never_used(longtake, mistake, copy: Path, tmp_path: Path):
    older = shutil.copytree(copy / "epoch0-global_step3", copy / "epoch0-global_step2")
    shard = next((copy / "epoch0-global_step3").glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(data)
    for words, said in (((), ["complete", "complete"]), (("--verify",), ["complete", "damaged"])):
        code, out, _ = longtake("checkpoint", "list", copy, *words)
        states = [line.split(" ")[-1] if line.endswith("complete") else "damaged" for line in out.splitlines()[1:]]
        assert (code, states) == (0, said)
    assert f"{shard.name} has checksum" in out
    (copy / "epoch0-global_step3" / "COMPLETE").unlink()
    assert "damaged: has no COMPLETE file" in longtake("checkpoint", "list", copy)[1]
    for words in (("inspect", copy), ("verify", copy), ("export", copy, tmp_path / "weights")):
        assert mistake("checkpoint", *words).endswith(
            "is damaged: has no COMPLETE file, so its save or its removal "
            f"was cut off; choose another checkpoint, such as {older}"
        )
    code, _, _ = longtake("checkpoint", "export", older, tmp_path / "weights")
    assert code == 0, "what the sentence names is taken"


def test_inspect_shows_each_tensor_on_one_line_and_the_totals(longtake, run: Outcome):
    code, out, _ = longtake("checkpoint", "inspect", run.folder)
    lines = out.splitlines()
    (row,) = (line for line in lines if line.startswith("model.img_in.weight"))
    assert code == 0
    assert row.split() == ["model.img_in.weight", "[32,", "1536]", "float32", "196.6", "kB"]
    assert [line.split(":")[0] for line in lines[-3:]] == ["ema", "model", "optim"]


def test_verify_finds_a_changed_byte(longtake, mistake, copy: Path):
    assert longtake("checkpoint", "verify", copy)[:2] == (0, f"{copy / 'epoch0-global_step3'}: whole\n")
    shard = next((copy / "epoch0-global_step3").glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(data)
    said = mistake("checkpoint", "verify", copy)
    assert "damaged" in said
    assert shard.name in said


def test_a_damaged_checkpoint_is_not_exported(mistake, copy: Path, tmp_path: Path):
    shard = next((copy / "epoch0-global_step3").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    assert "is damaged" in mistake("checkpoint", "export", copy, tmp_path / "w.safetensors")
    assert not (tmp_path / "w.safetensors").exists()


@pytest.mark.parametrize("part", ["ema", "model"])
def test_export_writes_one_file_with_plain_names(longtake, run: Outcome, tmp_path: Path, part: str):
    target = tmp_path / "new" / "w.safetensors"
    code, out, _ = longtake("checkpoint", "export", run.folder, target, "--part", part)
    assert (code, out) == (0, f"{target}\n")
    with safe_open(target, framework="pt") as file:
        assert "img_in.weight" in file.keys()  # noqa: SIM118 (safe_open is no mapping)
        assert file.metadata()["part"] == part


def test_an_export_into_a_folder_has_hugging_faces_layout_and_is_taken_by_generate(
    longtake, run: Outcome, tmp_path: Path
):
    target = tmp_path / "weights"
    assert longtake("checkpoint", "export", run.folder, target, "--max-file-gb", "0.0001")[:2] == (0, f"{target}\n")
    assert len(list(target.glob("model-*-of-*.safetensors"))) > 1
    assert (target / "model.safetensors.index.json").is_file()
    config = resolve_source(str(target), []).config
    assert config.model.from_pretrained == str(target)
    assert config.model.hidden_size == 32


def test_export_overwrites_nothing_and_refuses_other_names_and_parts(mistake, run: Outcome, tmp_path: Path):
    target = tmp_path / "w.safetensors"
    target.write_text("mine")
    assert "is not overwritten" in mistake("checkpoint", "export", run.folder, target)
    assert target.read_text() == "mine"
    assert "ends in .safetensors" in mistake("checkpoint", "export", run.folder, tmp_path / "w.pt")
    assert "no part 'optimizer'" in mistake(
        "checkpoint", "export", run.folder, tmp_path / "x.safetensors", "--part", "optimizer"
    )


def test_a_place_without_checkpoints_is_named(mistake, tmp_path: Path):
    assert "no such folder" in mistake("checkpoint", "list", tmp_path / "gone")
    assert "holds no checkpoint" in mistake("checkpoint", "list", tmp_path)
    assert "nothing is there" in mistake("checkpoint", "inspect", tmp_path / "gone")
