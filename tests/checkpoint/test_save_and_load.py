"""One process: every kind of tensor comes back; what does not fit, is damaged or was cut off is told in a sentence."""

from __future__ import annotations

import errno
import json
import os
import pickle
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import Tensor

from longtake.checkpoint import load
from longtake.checkpoint.folder import is_complete, read_state, verify
from longtake.checkpoint.layout import Piece, deal_into_files
from longtake.checkpoint.load import load_tensors
from longtake.checkpoint.runs import list_checkpoints, retain
from longtake.checkpoint.save import save_checkpoint
from longtake.contracts import UserError
from tests import forks


def some_tensors() -> dict[str, Tensor]:
    return {"model.w": torch.arange(12.0).reshape(3, 4), "ema.w": torch.ones(3, 4), "optim.w.step": torch.tensor(7.0)}


def empty_like(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path / "run", 2, 30, some_tensors(), {"clock": {"global_step": 30}})


def test_every_kind_of_tensor_comes_back_bit_by_bit(tmp_path):
    weight = torch.randn(6, 5)
    tensors = {
        "model.plain": weight,
        "model.tied": weight,
        "model.rows of it": weight[1:3],
        "model.transposed": torch.randn(4, 7).t(),
        "model.channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "model.parameter": torch.nn.Parameter(torch.randn(3)),
        "model.bf16": torch.randn(3).bfloat16(),
        "model.f64": torch.randn(3).double(),
        "model.bool": torch.tensor([True, False]),
        "model.i64": torch.tensor([2**62, -1]),
        "model.none of it": torch.empty(0, 3),
        "model.fp8": torch.randn(4).to(torch.float8_e4m3fn),
        "model.nan": torch.tensor([float("nan"), -0.0, float("inf")]),
        "optim.plain.step": torch.tensor(3.0),
    }
    into = empty_like(tensors)
    loaded = load_tensors(save_checkpoint(tmp_path, 0, 1, tensors, {}), into)
    assert set(loaded.filled) == set(tensors)
    for name, tensor in tensors.items():
        bits, found = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (tensor, into[name]))
        assert torch.equal(bits, found), name


def test_the_state_comes_back_with_every_bit_of_its_numbers(tmp_path):
    state = {"loss": 0.1 + 0.2, "key": 2**64 - 1, "last": {"256px/1f/1:1": None}, "flags": [True, "é"], "inf": 1e999}
    assert read_state(save_checkpoint(tmp_path, 0, 1, some_tensors(), state)) == state


def test_the_folder_holds_safetensors_json_and_the_marker_and_nothing_else(saved):
    assert saved.name == "epoch2-global_step30"
    names = sorted(path.name for path in saved.iterdir())
    assert names[:2] == ["COMPLETE", "run.json"]
    assert all(name.endswith(".safetensors") for name in names[2:])
    assert json.loads((saved / "run.json").read_text())["format_version"] == 1


def test_every_file_is_on_disk_before_the_marker_and_the_marker_before_the_checkpoint_has_its_name(
    tmp_path, monkeypatch
):
    order, fsync, rename = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda f: (order.append(Path(os.readlink(f"/proc/self/fd/{f}"))), fsync(f)))
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append((Path(a), Path(b))), rename(a, b)))
    saved = save_checkpoint(tmp_path, 0, 1, some_tensors(), {})
    partial = tmp_path / "epoch0-global_step1.partial"
    (marker,) = (i for i, event in enumerate(order) if isinstance(event, tuple) and event[1] == partial / "COMPLETE")
    shards = {partial / path.name for path in saved.glob("*.safetensors")}
    assert shards <= set(order[:marker])
    assert order[marker - 1] == order[marker][0], "what becomes COMPLETE is on disk itself"
    assert order[marker + 1 :] == [partial, (partial, saved), tmp_path]


def test_a_checkpoint_is_not_removed_while_its_tensors_load(saved, monkeypatch):
    save_checkpoint(saved.parent, 2, 40, some_tensors(), {})
    read, held = load._read, []

    def slowly(*args):
        held.append(retain(saved.parent, 1) == [] and saved.exists())
        read(*args)

    monkeypatch.setattr(load, "_read", slowly)
    into = empty_like(some_tensors())
    load_tensors(saved, into)
    assert held == [True]
    assert torch.equal(into["model.w"], some_tensors()["model.w"])
    assert retain(saved.parent, 1) == [saved]


def test_no_file_mixes_parts_or_grows_past_the_limit():
    pieces = [Piece(f"{part}.{i}", (0,), (10,), torch.float32) for part in ("model", "ema") for i in range(3)]
    files = [[piece.name for piece in file] for file in deal_into_files(pieces, limit_bytes=80)]
    assert files == [["ema.0", "ema.1"], ["ema.2"], ["model.0", "model.1"], ["model.2"]]


def test_a_complete_checkpoint_is_not_overwritten(saved):
    before = (saved / "COMPLETE").read_bytes()
    with pytest.raises(UserError, match="complete checkpoint already and is not overwritten"):
        save_checkpoint(saved.parent, 2, 30, empty_like(some_tensors()), {})
    assert (saved / "COMPLETE").read_bytes() == before
    assert verify(saved) == []


def test_a_checkpoint_whose_marker_cannot_be_read_is_incomplete_and_is_replaced(saved):
    (saved / "COMPLETE").write_text("{", encoding="utf-8")
    assert [info.complete for info in list_checkpoints(saved.parent)] == [False]
    assert save_checkpoint(saved.parent, 2, 30, some_tensors(), {}) == saved
    assert verify(saved) == []


def test_saving_over_an_incomplete_folder_replaces_it(saved):
    (saved / "COMPLETE").unlink()
    (saved / "stray.safetensors").write_bytes(b"x")
    save_checkpoint(saved.parent, 2, 30, some_tensors(), {"again": True})
    assert verify(saved) == []
    assert read_state(saved) == {"again": True}


def test_a_killed_save_does_not_exist_and_the_next_save_clears_it_away(saved):
    program = """
        import os, signal, sys, torch
        import longtake.checkpoint.writer as writer
        from longtake.checkpoint.save import save_checkpoint
        write = writer.write_whole
        def killed_at_the_marker(path, content):
            os.kill(os.getpid(), signal.SIGKILL) if path.name == "COMPLETE" else write(path, content)
        writer.write_whole = killed_at_the_marker
        save_checkpoint(sys.argv[1], 2, 40, {"model.w": torch.ones(3)}, {})
    """
    run = saved.parent
    command = [sys.executable, "-c", textwrap.dedent(program), str(run)]
    killed = forks.run(command)
    assert killed.returncode == -9, killed.stderr
    assert (run / "epoch2-global_step40.partial" / "run.json").exists()
    assert [info.step for info in list_checkpoints(run)] == [30]
    assert not is_complete(run / "epoch2-global_step40.partial")
    save_checkpoint(run, 2, 50, some_tensors(), {})
    assert sorted(path.name for path in run.iterdir()) == ["epoch2-global_step30", "epoch2-global_step50"]


@pytest.mark.parametrize("moment", ["shards", "marker"])
def test_a_full_disk_is_one_sentence_and_the_last_checkpoint_stays(moment, saved, monkeypatch):
    true_fsync, calls = os.fsync, []

    def full_disk(descriptor: int) -> None:
        calls.append(descriptor)
        if moment == "shards" or len(calls) > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        true_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(UserError, match=r"the disk is full .* the half-written folder was removed") as caught:
        save_checkpoint(saved.parent, 2, 40, some_tensors(), {})
    assert "\n" not in str(caught.value)
    monkeypatch.undo()
    assert [path.name for path in saved.parent.iterdir()] == ["epoch2-global_step30"]
    assert verify(saved) == []


def test_an_outputs_folder_that_is_a_file_is_told(tmp_path):
    (tmp_path / "outputs").write_text("")
    with pytest.raises(UserError, match=r"outputs.*cannot be made"):
        save_checkpoint(tmp_path / "outputs" / "run", 0, 1, some_tensors(), {})


def flip_last_byte(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


DAMAGES = {
    "missing": (lambda path: path.unlink(), "is missing"),
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-9]), "bytes instead of"),
    "one bit": (flip_last_byte, "has checksum"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("which", ["*.safetensors", "run.json"])
def test_a_damaged_file_is_named_and_nothing_is_loaded(which, damage, saved):
    spoil, said = DAMAGES[damage]
    path = sorted(saved.glob(which))[0]
    spoil(path)
    assert [fault for fault in verify(saved) if path.name in fault and said in fault]
    into = empty_like(some_tensors())
    with pytest.raises(UserError, match=f"is damaged: {path.name} .*{said}.*choose another"):
        load_tensors(saved, into)
    assert not any(tensor.any() for tensor in into.values())


def test_a_damaged_state_is_told(saved):
    flip_last_byte(saved / "run.json")
    with pytest.raises(UserError, match=r"is damaged: run.json has checksum"):
        read_state(saved)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "has no COMPLETE file, so its save or its removal was cut off"),
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        ('{"format_version": 2, "files": []}', "has checkpoint format 2, this version of longtake reads format 1"),
    ],
)
def test_a_marker_that_is_missing_broken_or_newer_stops_every_reader(content, said, saved):
    if content is None:
        (saved / "COMPLETE").unlink()
    else:
        (saved / "COMPLETE").write_text(content)
    for read in (read_state, lambda folder: load_tensors(folder, some_tensors())):
        with pytest.raises(UserError, match=said):
            read(saved)
    assert said in verify(saved)[0]


def test_a_marker_that_points_out_of_its_folder_is_refused(saved):
    content = json.loads((saved / "COMPLETE").read_text())
    content["files"]["../../secret"] = content["files"]["run.json"]
    (saved / "COMPLETE").write_text(json.dumps(content))
    assert "tampered" in verify(saved)[0]


class Bomb:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return (Path.write_text, (self.target, "executed"))


def test_a_planted_pickle_is_not_executed(saved, tmp_path):
    proof, bomb = tmp_path / "proof", pickle.dumps(Bomb(tmp_path / "proof"))
    pickle.loads(bomb)
    assert proof.read_text() == "executed"  # the bomb works
    proof.unlink()
    for name in (".metadata", "__0_0.distcp", "model.pt", "optim.pth", "pytorch_model.bin"):
        (saved / name).write_bytes(bomb)
    into = empty_like(some_tensors())
    load_tensors(saved, into)
    assert torch.equal(into["model.w"], some_tensors()["model.w"])
    assert not proof.exists()
    (saved / "shard-00009-model-00001-of-00001.safetensors").write_bytes(bomb)
    with pytest.raises(UserError, match=r"shard-00009.* is not listed in COMPLETE"):
        load_tensors(saved, into)
    assert not proof.exists()


def test_missing_and_surplus_names_stop_and_are_named(saved):
    into = empty_like(some_tensors())
    into["model.new"] = into.pop("model.w")
    with pytest.raises(UserError, match=r"has no model.new and holds model.w unasked"):
        load_tensors(saved, into)
    assert not any(tensor.any() for tensor in into.values()), "nothing is loaded where something is missing"


def test_not_strict_fills_what_fits_and_says_what_did_not(saved):
    into = {"model.new": torch.full((2,), 5.0), "ema.w": torch.zeros(3, 4, dtype=torch.bfloat16)}
    loaded = load_tensors(saved, into, strict=False)
    assert (loaded.filled, loaded.missing, loaded.surplus) == (("ema.w",), ("model.new",), ("model.w",))
    assert into["model.new"].tolist() == [5.0, 5.0]
    assert into["ema.w"].eq(1).all()


def test_a_part_that_is_not_asked_for_is_not_surplus(saved):
    into = {"ema.w": torch.zeros(3, 4)}
    assert load_tensors(saved, into).surplus == ()
    assert into["ema.w"].eq(1).all()


@pytest.mark.parametrize("strict", [True, False])
def test_another_shape_is_always_refused(strict, saved):
    into = {"ema.w": torch.zeros(4, 3)}
    with pytest.raises(UserError, match=r"ema.w is \(3, 4\), the run has \(4, 3\)"):
        load_tensors(saved, into, strict=strict)


def test_another_dtype_is_refused_when_strict(saved):
    with pytest.raises(UserError, match=r"ema.w is torch.float32, the run has torch.bfloat16"):
        load_tensors(saved, {"ema.w": torch.zeros(3, 4, dtype=torch.bfloat16)})
