"""A configuration written as a file reads back equal, and can be shown with its origins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longtake.config.dump import dump_config
from longtake.config.faults import ConfigError
from longtake.config.load import describe, load_config, resolve
from tests.config.schemas import AnyTree, Mmdit, Run, Stdit, write
from tests.config.trees import trees


@settings(max_examples=60)
@given(tree=trees())
def test_any_tree_reads_back_equal_from_its_dump(tree: AnyTree, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("dump") / "run.py"
    path.write_text(dump_config(tree), encoding="utf-8")
    assert repr(load_config(path, [], AnyTree).value) == repr(tree)


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0")).filter(lambda text: text != "TODO")
RUNS = st.builds(
    Run,
    model=st.one_of(
        st.builds(Mmdit, depth=st.integers(1, 99), grad_ckpt_settings=st.none() | st.just((8, 100))),
        st.builds(Stdit, type=st.just("stdit"), qk_norm=st.booleans()),
    ),
    bucket_config=st.dictionaries(
        st.sampled_from(["256px", "768px_ar16:9", "1024px_max"]),
        st.dictionaries(st.integers(1, 129), st.tuples(st.floats(0, 1) | st.just((0.5, 0.25)), st.integers(1, 50))),
    ),
    lr=st.floats(0, 1),
    name=TEXT,
    load=st.none() | TEXT | st.lists(TEXT, max_size=30),
    tags=st.dictionaries(TEXT, TEXT),
)


@settings(max_examples=60)
@given(run=RUNS)
def test_a_run_reads_back_equal_from_its_dump(run: Run, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("dump") / "run.py"
    path.write_text(dump_config(run), encoding="utf-8")
    assert load_config(path, [], Run).value == run


def test_a_dump_is_a_readable_file_with_every_default() -> None:
    run = Run(bucket_config={"256px": dict.fromkeys(range(5, 50, 4), (1.0, 12)), "768px": {1: (0.5, 11)}})
    text = dump_config(run)
    assert 'model = dict(type="mmdit", depth=1, hidden_size=64, grad_ckpt_settings=None, from_pretrained=None)' in text
    assert 'bucket_config = {\n    "256px": {\n        5: (1.0, 12),\n' in text
    assert '    "768px": {1: (0.5, 11)},\n}\n' in text
    assert 'dataset = dict(data_path="clips.csv", views=1)' in text
    assert max(len(line) for line in text.splitlines()) <= 120


@pytest.mark.parametrize(
    "tree",
    [{"a-b": 1}, {"_x": 1}, {"class": 1}, {"x": float("nan")}, {"x": object()}, {"x": {1: 1, "1": 2}},
     {"x": {"_delete_": 1}}, {"x": {2.5: 1}}],
)  # fmt: skip
def test_what_a_file_cannot_say_is_refused(tree: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        dump_config(tree)


def test_every_value_is_described_with_its_origin(tmp_path: Path) -> None:
    path = write(tmp_path, run="lr = 2\noptim = dict(lr=lr)\nbucket_config = {'256px': {33: (1.0, 2)}}")
    rows = {row.key: (row.value, row.origin) for row in describe(load_config(path, ["--wandb", "--lr", "3"], Run))}
    assert rows["lr"] == (3.0, "--lr")
    assert rows["optim.lr"] == (3.0, f"{path}:2, from lr (--lr)")
    assert rows["optim.eps"] == (1e-8, "default")
    assert rows["bucket_config.256px.33"] == ((1.0, 2), f"{path}:3")
    assert rows["wandb"] == (True, "--wandb")
    assert rows["tags"] == ({}, "default")
    assert rows["dataset.data_path"] == ("clips.csv", "default")


def test_plain_data_resolves_like_a_file() -> None:
    resolved = resolve({"optim": {"lr": 3}}, ["--steps", "7"], Run, place="demo")
    assert (resolved.value.optim.lr, resolved.value.steps, resolved.path) == (3.0, 7, None)
    assert str(resolved.origins["optim.lr"]) == "demo"
    assert resolved.tree == {"optim": {"lr": 3}, "steps": 7}
