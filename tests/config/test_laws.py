"""Laws of merging and of flags, on random trees."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from longtake.config.dump import dump_config
from longtake.config.faults import Fault, quote
from longtake.config.load import load_config, resolve
from longtake.config.tree import Branch, Node, Origin, dotted, grow, leaves, merge, plain
from tests.config.schemas import AnyTree
from tests.config.trees import marked_trees, trees


def node(tree: AnyTree) -> Node:
    return grow(tree, Origin("test"))


def merged(below: Node, above: Node) -> Node:
    """The merge, given that nothing is wrong with it."""
    found: list[Fault] = []
    result = merge(below, above, found.append)
    assume(not found)
    return result


@settings(max_examples=300)
@given(a=marked_trees(), b=marked_trees(), c=marked_trees())
def test_layers_may_be_merged_from_either_end(a: AnyTree, b: AnyTree, c: AnyTree) -> None:
    left = merged(merged(node(a), node(b)), node(c))
    right = merged(node(a), merged(node(b), node(c)))
    assert plain(left) == plain(right)


@given(tree=trees())
def test_an_empty_layer_changes_nothing_above_or_below(tree: AnyTree) -> None:
    assert plain(merged(node(tree), node({}))) == tree
    assert plain(merged(node({}), node(tree))) == tree


@given(tree=trees())
def test_a_layer_over_itself_changes_nothing(tree: AnyTree) -> None:
    assert plain(merged(node(tree), node(tree))) == tree


@given(below=marked_trees(), above=trees())
def test_the_child_wins_wherever_it_says_something(below: AnyTree, above: AnyTree) -> None:
    result = merged(node(below), node(above))
    for path, leaf in leaves(node(above)):
        here: Any = plain(result)
        for key in path:
            here = here[key]
        assert here == plain(leaf) or isinstance(leaf, Branch)


@given(below=trees(), above=trees(), mark=trees())
def test_what_is_marked_with_delete_is_all_that_is_left(below: AnyTree, above: AnyTree, mark: AnyTree) -> None:
    result = merge(node({"m": below}), node({"m": {**above, "_delete_": True}}), lambda fault: pytest.fail(str(fault)))
    assert plain(result) == {"m": above}


@given(tree=trees())
def test_merging_leaves_its_inputs_alone(tree: AnyTree) -> None:
    below = node({"m": tree})
    merge(below, node({"m": {"new": {"key": 1}}, "other": 2}), lambda fault: None)
    assert plain(below) == {"m": tree}


def as_flags(tree: AnyTree, choose: random.Random) -> list[list[str]]:
    """Each leaf of a tree as one flag, in either form."""
    flags = []
    for path, leaf in leaves(node(tree)):
        value = plain(leaf)
        name, text = "--" + dotted(path), quote(value) if isinstance(value, str) else repr(value)
        flags.append([f"{name}={text}"] if choose.random() < 0.5 else [name, text])
    return flags


@given(tree=trees(), choose=st.randoms(use_true_random=False))
def test_a_tree_written_as_flags_is_that_tree(tree: AnyTree, choose: random.Random) -> None:
    words = [word for flag in as_flags(tree, choose) for word in flag]
    assert repr(resolve({}, words, AnyTree).tree) == repr(tree)


@given(tree=trees(), given_tree=trees(), choose=st.randoms(use_true_random=False))
def test_the_order_of_flags_of_different_keys_does_not_matter(
    tree: AnyTree, given_tree: AnyTree, choose: random.Random
) -> None:
    flags = as_flags(tree, choose)
    results = []
    merged(node(given_tree), node(tree))
    for _ in range(2):
        results.append(resolve(given_tree, [word for flag in flags for word in flag], AnyTree).tree)
        choose.shuffle(flags)
    assert results[0] == results[1]


@settings(max_examples=40)
@given(base=trees(), child=trees())
def test_a_base_and_its_child_are_the_merge_of_their_trees(
    base: AnyTree, child: AnyTree, tmp_path_factory: pytest.TempPathFactory
) -> None:
    expected = plain(merged(node(base), node(child)))
    folder = tmp_path_factory.mktemp("laws")
    (folder / "base.py").write_text(dump_config(base), encoding="utf-8")
    (folder / "run.py").write_text("_base_ = 'base.py'\n" + dump_config(child), encoding="utf-8")
    assert load_config(folder / "run.py", [], AnyTree).tree == expected


@given(lr=st.integers(-1000, 1000), factor=st.integers(-9, 9), flag=st.none() | st.integers(-1000, 1000))
def test_a_derived_value_is_always_derived_from_the_final_one(
    lr: int, factor: int, flag: int | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("late")
    (folder / "base.py").write_text(f"lr = 1\ntwice = lr * 2\noptim = dict(lr=lr, more=[twice + {factor}])")
    (folder / "run.py").write_text(f"_base_ = 'base.py'\nlr = {lr}")
    tree = load_config(folder / "run.py", [] if flag is None else [f"--lr={flag}"], AnyTree).tree
    final = lr if flag is None else flag
    assert tree == {"lr": final, "twice": 2 * final, "optim": {"lr": final, "more": [2 * final + factor]}}
