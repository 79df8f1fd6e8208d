"""What a schema refuses is said as place, value, rule and fix; all of it at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from longtake.config.faults import ConfigError, Fault
from longtake.config.load import load_config, resolve
from longtake.config.section import Section
from longtake.contracts import UserError
from tests.config.schemas import AnyTree, Run, faults, write


def said(tree: AnyTree, schema: Any = Run) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        resolve(tree, [], schema, place="x.py")
    return [str(fault) for fault in caught.value.faults]


def test_a_wrong_value_is_said_with_key_line_rule_and_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    write(tmp_path / "configs", x='optim = dict(\n    eps=1,\n    lr="fast",\n)')
    with pytest.raises(UserError) as caught:
        load_config("configs/x.py", [], Run)
    assert str(caught.value) == 'optim.lr = "fast" (configs/x.py:3): must be a number; write for example 1e-4'


def test_all_faults_come_at_once_from_every_file_and_flag(tmp_path: Path) -> None:
    base = "optim = dict(lr='fast', epss=1)\nsteps = 1.5\nbad = 1 / 0"
    run = write(tmp_path, base=base, run="_base_ = 'base.py'\nmodel = dict(depth=0)")
    found = faults(run, "--wandb", "maybe", "stray", "--hidden_size", "3", schema=Run)
    assert {(fault.key, fault.place) for fault in found} == {
        ("", f"{tmp_path}/base.py:3"),
        ("", "command line"),
        ("optim.lr", f"{tmp_path}/base.py:1"),
        ("optim.epss", f"{tmp_path}/base.py:1"),
        ("steps", f"{tmp_path}/base.py:2"),
        ("model.depth", f"{tmp_path}/run.py:2"),
        ("wandb", "--wandb"),
        ("hidden_size", "--hidden_size"),
    }


@pytest.mark.parametrize(
    ("tree", "fault"),
    [
        ({"steps": "x"}, 'steps = "x" (x.py): must be a whole number; write for example 8'),
        ({"steps": True}, "steps = True (x.py): must be a whole number"),
        ({"steps": None}, "steps = None (x.py): must be a whole number; leave it out for the default, 10"),
        ({"every": None}, "every = None (x.py): must be a whole number; write 0 (never)"),
        ({"name": "TODO"}, 'name = "TODO" (x.py): is a placeholder; write the value, or delete the line'),
        ({"lr": True}, "lr = True (x.py): must be a number"),
        ({"wandb": 3}, "wandb = 3 (x.py): must be True or False"),
        ({"name": 3}, 'name = 3 (x.py): must be text; write it in quotes, as "x"'),
        ({"load": 3}, 'load = 3 (x.py): must be text or a list; write it in quotes, as "x"'),
        ({"optim": 3}, "optim = 3 (x.py): must be a dict of its keys; write dict(key=value)"),
        ({"tags": 3}, "tags = 3 (x.py): must be a dict; write dict(key=value)"),
        ({"optim": {"betas": 3}}, "optim.betas = 3 (x.py): must be a list or tuple; write for example (1, 2)"),
        ({"optim": {"betas": (1,)}}, "optim.betas = (1,) (x.py): has too few entries: entry 2 is missing"),
        ({"optim": {"betas": [1, 2, 3]}}, "optim.betas = [1, 2, 3] (x.py): must have at most 2 entries, not 3"),
        ({"model": {"depth": 0}}, "model.depth = 0 (x.py): must be at least 1"),
        ({"dataset": {"views": 2, "_delete_": True}}, "dataset.data_path (x.py): is required; write it there or as "
         "--dataset.data_path value"),
        ({"optim": {"cls": "adam"}}, 'optim.cls = "adam" (x.py): must be one of "adamw", "sgd"; did you mean "adamw"?'),
        ({"model": {"type": "mmditt"}}, 'model.type = "mmditt" (x.py): must be one of "mmdit", "stdit"; did you mean '
         '"mmdit"?'),
        ({"bucket_config": {"256px": {33: ("p", 2)}}}, 'bucket_config.256px.33.0 = "p" (x.py): must be a number or '
         "a list or tuple; write for example 1e-4"),
        ({"bucket_config": {"256px": {"x": (1, 2)}}}, 'bucket_config.256px.x = "x" (x.py): must be a whole number; '
         "write for example 8"),
        ({"warmup_steps": 20}, "x.py: warmup_steps = 20: the run has 10 steps; take fewer"),
        ({"lr": float("inf")}, "lr = inf (x.py): must be a finite number; write for example 1e-4"),
        ({"name": "a" * 500}, ""),
    ],
)  # fmt: skip
def test_each_kind_of_mistake_has_its_sentence(tree: AnyTree, fault: str) -> None:
    if fault:
        assert said(tree) == [fault]
    else:
        assert resolve(tree, [], Run).value.name == "a" * 500


@pytest.mark.parametrize(
    ("tree", "hint"),
    [
        ({"optim": {"epss": 1}}, "did you mean optim.eps?"),
        ({"hidden_size": 1}, "did you mean model.hidden_size?"),
        ({"grad_ckpt_setting": (1, 2)}, "did you mean model.grad_ckpt_settings?"),
        ({"model": {"type": "stdit", "qk_norms": 1}}, "did you mean model.qk_norm?"),
        (
            {"model": {"type": "stdit", "from_pretrained": "x"}},
            'it belongs to model.type = "mmdit", and this is "stdit"',
        ),
        ({"model": {"type": "stdit", "zzz": 1}}, "the names here are type, depth, qk_norm"),
        ({"no_wandb": True}, "write --wandb False"),
        ({"qqq": {"a": 1}}, "the names here are dataset, model, optim, bucket_config, lr, steps"),
        ({"optim": {5: 1}}, "the names here are cls, lr, eps, betas"),
    ],
)
def test_an_unknown_key_gets_the_nearest_name(tree: AnyTree, hint: str) -> None:
    found = said(tree)
    assert len(found) == 1
    assert "is no key; " in found[0]
    assert hint in found[0]


def test_of_a_union_the_member_that_came_nearest_is_reported() -> None:
    class A(Section):
        n: int = 1
        m: int = 1

    class B(Section):
        k: int = 1

    class Holder(Section):
        part: A | B | None = None
        mode: Literal["a", "b"] | int = 3

    assert said({"part": {"n": "x", "m": 2}}, Holder) == [
        'part.n = "x" (x.py): must be a whole number; write for example 8'
    ]
    assert said({"part": 3}, Holder) == ["part = 3 (x.py): must be a dict of its keys; write dict(key=value)"]
    assert 'must be one of "a", "b"' in said({"mode": "c"}, Holder)[0]


def test_a_section_given_in_part_keeps_the_default_of_its_schema() -> None:
    class A(Section):
        type: Literal["a"] = "a"
        n: int = 1
        m: int = 1

    class B(Section):
        type: Literal["b"] = "b"
        n: int = 2

    class Holder(Section):
        part: Annotated[A | B, Field(discriminator="type")] = A(n=5)

    assert resolve({"part": {"m": 3}}, [], Holder).value.part == A(n=5, m=3)
    assert resolve({"part": {"type": "b"}}, [], Holder).value.part == B(n=2)
    assert resolve({}, ["--part.n", "7"], Holder).value.part == A(n=7)
    assert resolve({"part": {"m": 3}}, [], Holder).tree == {"part": {"m": 3}}


def test_a_faulty_name_does_not_look_like_a_missing_one(tmp_path: Path) -> None:
    class Holder(Section):
        size: int
        depth: int

    assert [fault.key for fault in faults(write(tmp_path, run="size = foo"), schema=Holder)] == ["", "depth"]


def test_a_fault_is_one_line_whatever_it_holds() -> None:
    text = str(Fault("x.py:1", "a\nb\x1b[31m\ud800", "must be\ttext", key="k"))
    assert text == "k = a\\nb\\x1b[31m\\ud800 (x.py:1): must be\\ttext"


def test_a_broken_file_shows_a_hundred_faults_and_says_that_there_are_more() -> None:
    found = said({f"unknown{i}": i for i in range(500)})
    assert len(found) == 101
    assert "not shown" in found[-1]
