"""Inheritance and late binding."""

from __future__ import annotations

from pathlib import Path

from longtake.config.load import load_config
from tests.config.schemas import AnyTree, faults, load, write


def test_dicts_merge_key_by_key_and_everything_else_is_replaced(tmp_path: Path) -> None:
    base = "model = dict(depth=19, axes=[16, 56, 56], ema=None)\nseed = 1"
    child = "_base_ = 'base.py'\nmodel = dict(axes=[4], ema=dict(decay=0.9))"
    assert load(write(tmp_path, base=base, run=child)) == {
        "model": {"depth": 19, "axes": [4], "ema": {"decay": 0.9}},
        "seed": 1,
    }


def test_delete_replaces_a_dict_wholesale(tmp_path: Path) -> None:
    base = "buckets = {'256px': {1: 2, 33: 4}, '768px': {1: 1}}"
    child = "_base_ = 'base.py'\nbuckets = {'256px': dict(_delete_=True, x=3), '512px': dict(_delete_=True)}"
    assert load(write(tmp_path, base=base, run=child)) == {"buckets": {"256px": {"x": 3}, "768px": {1: 1}, "512px": {}}}


def test_bases_are_found_relative_to_the_file_that_names_them(tmp_path: Path) -> None:
    (tmp_path / "plugins").mkdir()
    write(tmp_path, root="a = 1")
    write(tmp_path / "plugins", sp="_base_ = '../root.py'\nb = a + 1")
    run = write(tmp_path, other="c = 5", run="_base_ = ['plugins/sp.py', 'other.py']\nd = a + b + c")
    assert load(run) == {"a": 1, "b": 2, "c": 5, "d": 8}


def test_a_child_that_changes_a_name_changes_what_its_base_derived(tmp_path: Path) -> None:
    base = "lr = 1e-5\nsteps = 10\noptim = dict(lr=lr, eps=1)\ntotal = steps * 2"
    run = write(tmp_path, base=base, run="_base_ = 'base.py'\nlr = 5e-5")
    assert load(run)["optim"] == {"lr": 5e-5, "eps": 1}
    assert load(run, "--lr", "7", "--steps", "4") == {"lr": 7, "steps": 4, "optim": {"lr": 7, "eps": 1}, "total": 8}


def test_a_change_reaches_through_a_chain_of_bases_and_names(tmp_path: Path) -> None:
    write(tmp_path, a="lr = 1\nhalf = lr / 2", b="_base_ = 'a.py'\nquarter = half / 2")
    run = write(tmp_path, c="_base_ = 'b.py'\nlr = 8\neighth = quarter / 2")
    assert load(run) == {"lr": 8, "half": 4, "quarter": 2, "eighth": 1}
    assert load(run, "--half", "16") == {"lr": 8, "half": 16, "quarter": 8, "eighth": 4}


def test_private_names_bind_late_too(tmp_path: Path) -> None:
    base = "_batch = 2\nbuckets = {33: (1.0, _batch)}"
    assert load(write(tmp_path, base=base, run="_base_ = 'base.py'\n_batch = 4")) == {"buckets": {33: (1.0, 4)}}


def test_an_expression_may_use_the_value_below_the_name_it_assigns(tmp_path: Path) -> None:
    base = "lr = 1\noptim = dict(lr=lr)"
    assert load(write(tmp_path, base=base, run="_base_ = 'base.py'\nlr = lr * 5")) == {"lr": 5, "optim": {"lr": 5}}
    assert load(write(tmp_path, run="lr = 1\nlr = lr * 2\nlr = lr + 1")) == {"lr": 3}
    assert load(tmp_path / "run.py", "--lr", "9") == {"lr": 9}


def test_within_a_file_an_expression_sees_the_latest_assignment_above_it(tmp_path: Path) -> None:
    run = write(tmp_path, run="x = 1\ny = x\nx = 2\nz = x")
    assert load(run) == {"x": 2, "y": 1, "z": 2}
    assert load(run, "--x", "5") == {"x": 5, "y": 5, "z": 5}


def test_a_name_stands_for_the_merged_dict(tmp_path: Path) -> None:
    base = "model = dict(depth=19, width=64)"
    child = "_base_ = 'base.py'\nmodel = dict(depth=2)\nema_model = dict(model, decay=0.5)"
    run = write(tmp_path, base=base, run=child)
    assert load(run)["ema_model"] == {"depth": 2, "width": 64, "decay": 0.5}
    assert load(run, "--model.depth", "4")["ema_model"] == {"depth": 4, "width": 64, "decay": 0.5}


def test_a_copy_of_a_dict_that_replaced_its_base_does_not_replace(tmp_path: Path) -> None:
    base = "a = dict(x=1)\nb = dict(y=2)"
    run = write(tmp_path, base=base, run="_base_ = 'base.py'\na = dict(_delete_=True, z=3)\nb = a")
    assert load(run) == {"a": {"z": 3}, "b": {"y": 2, "z": 3}}


def test_the_explicit_value_wins_over_the_derived_one(tmp_path: Path) -> None:
    run = write(tmp_path, run="lr = 3\noptim = dict(lr=lr)")
    for flags in (("--lr", "1", "--optim.lr", "2"), ("--optim.lr", "2", "--lr", "1")):
        assert load(run, *flags) == {"lr": 1, "optim": {"lr": 2}}


def test_a_value_that_depends_on_itself_shows_the_way_round(tmp_path: Path) -> None:
    base = "lr = 1\neps = lr * 2\n"
    found = faults(write(tmp_path, base=base, run="_base_ = 'base.py'\nlr = eps * 2"))
    assert len(found) == 1
    assert "depends on itself: " in str(found[0])
    assert f"lr ({tmp_path}/run.py:2)" in str(found[0])
    assert f"eps ({tmp_path}/base.py:2)" in str(found[0])


def test_a_base_must_be_complete_without_its_children(tmp_path: Path) -> None:
    run = write(tmp_path, base="optim = dict(lr=lr)", run="_base_ = 'base.py'\nlr = 1")
    assert "is not defined above" in faults(run)[0].rule


def test_a_base_does_not_see_the_names_of_its_sibling(tmp_path: Path) -> None:
    run = write(tmp_path, a="lr = 1", b="eps = lr", run="_base_ = ['a.py', 'b.py']")
    assert [fault.place for fault in faults(run)] == [f"{tmp_path}/b.py:1"]


def test_two_bases_must_not_assign_the_same_name(tmp_path: Path) -> None:
    run = write(tmp_path, a="lr = 1\nx = 1", b="lr = 2\ny = 1", run="_base_ = ['a.py', 'b.py']\nlr = 3")
    found = faults(run)
    assert len(found) == 1
    assert found[0].key == "lr"
    assert f"{tmp_path}/b.py:1" in str(found[0])
    assert f"{tmp_path}/a.py:1" in str(found[0])


def test_a_circle_of_bases_is_named_link_by_link(tmp_path: Path) -> None:
    run = write(tmp_path, a="_base_ = 'b.py'", b="_base_ = 'c.py'", c="_base_ = 'a.py'")
    assert f"{tmp_path}/c.py -> {tmp_path}/a.py -> {tmp_path}/b.py -> {tmp_path}/c.py" in str(faults(run)[0])
    assert "base of itself" in str(faults(write(tmp_path, own="_base_ = ['own.py']"))[0])


def test_a_missing_base_names_both_files(tmp_path: Path) -> None:
    found = str(faults(write(tmp_path, run="x = 1\n_base_ = 'gone.py'"))[0])
    assert f"{tmp_path}/run.py:2" in found
    assert f"{tmp_path}/gone.py" in found


def test_a_dict_over_a_value_and_a_value_over_a_dict_are_faults(tmp_path: Path) -> None:
    base = "a = dict(x=1)\nb = 2\nc = None\nd = dict(x=1)"
    found = faults(write(tmp_path, base=base, run="_base_ = 'base.py'\na = 3\nb = dict(y=1)\nc = dict(z=1)\nd = None"))
    assert [(fault.key, fault.place) for fault in found] == [
        ("a", f"{tmp_path}/run.py:2"),
        ("b", f"{tmp_path}/run.py:3"),
    ]
    assert f"{tmp_path}/base.py:2" in found[1].rule


def test_origins_name_the_line_and_what_a_value_was_derived_from(tmp_path: Path) -> None:
    base = "lr = 1\noptim = dict(\n    lr=lr * 2,\n    eps=3,\n)"
    run = write(tmp_path, base=base, run="_base_ = 'base.py'\nlr = 5")
    origins = load_config(run, ["--optim.eps", "4"], AnyTree).origins
    assert str(origins["lr"]) == f"{tmp_path}/run.py:2"
    assert str(origins["optim.lr"]) == f"{tmp_path}/base.py:3, from lr ({tmp_path}/run.py:2)"
    assert str(origins["optim.eps"]) == "--optim.eps"
    origins = load_config(run, ["--lr", "4"], AnyTree).origins
    assert str(origins["optim.lr"]) == f"{tmp_path}/base.py:3, from lr (--lr)"
