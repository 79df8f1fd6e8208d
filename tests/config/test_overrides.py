"""Flags: how they are written, what their text means, where they land."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from longtake.config.faults import ConfigError
from longtake.config.load import load_config, resolve
from longtake.config.section import Section
from tests.config.schemas import AnyTree, Run


def tree_of(*flags: str, given: AnyTree | None = None, schema: Any = AnyTree) -> AnyTree:
    return resolve(given or {}, flags, schema).tree


def rules_of(*flags: str, given: AnyTree | None = None, schema: Any = AnyTree) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        resolve(given or {}, flags, schema)
    return [str(fault) for fault in caught.value.faults]


MEANINGS: dict[str, Any] = {
    "3": 3,
    "-3": -3,
    "1_000": 1000,
    "1e3": 1000.0,
    "-1.5E-3": -0.0015,
    ".5": 0.5,
    "none": None,
    "None": None,
    "true": True,
    "FALSE": False,
    "[1, 'a', (2,), None, true]": [1, "a", (2,), None, True],
    "(1.0, 2)": (1.0, 2),
    "{'a': {3: 1}}": {"a": {3: 1}},
    "'123'": "123",
    '"None"': "None",
    "": "",
    "a cat, running": "a cat, running",
    "2024-01-02": "2024-01-02",
    "2*3": "2*3",
    "nan": "nan",
    "1e999": "1e999",
    "[a, b]": "[a, b]",
    "(1, 2": "(1, 2",
    "[open('x')]": "[open('x')]",
    "it's": "it's",
}


@pytest.mark.parametrize("text", MEANINGS)
def test_the_text_of_a_flag_without_a_schema_means_the_obvious(text: str) -> None:
    for flags in (("--x", text), (f"--x={text}",)):
        assert repr(tree_of(*flags)["x"]) == repr(MEANINGS[text])


@pytest.mark.parametrize(
    ("flag", "text", "value"),
    [
        ("name", "123", "123"),
        ("name", "1.50", "1.50"),
        ("name", "true", "true"),
        ("name", "none", "none"),
        ("name", "'\"x\"'", '"x"'),
        ("model.from_pretrained", "none", None),
        ("model.from_pretrained", "7", "7"),
        ("load", "['a', 'b']", ["a", "b"]),
        ("load", "3", "3"),
        ("dataset.data_path", "7", "7"),
        ("tags.x", "007", "007"),
        ("steps", "1e3", 1000),
        ("lr", "3", 3.0),
        ("warmup_steps", "None", None),
        ("model.grad_ckpt_settings", "[8, 100]", (8, 100)),
    ],
)
def test_the_schema_settles_what_a_text_means(flag: str, text: str, value: Any) -> None:
    given = {"steps": 10, "dataset": {"data_path": "x"}}
    found: Any = resolve(given, ["--" + flag, text], Run).value
    for part in flag.split("."):
        found = found[part] if isinstance(found, dict) else getattr(found, part)
    assert found == value
    assert type(found) is type(value) or isinstance(value, Path)


def test_a_whole_number_from_a_flag_is_one_where_names_are_derived_from_it(tmp_path: Path) -> None:
    path = tmp_path / "run.py"
    path.write_text("steps = 2\ntags = {'t': 'a' * steps}")
    assert load_config(path, ["--steps", "1e1"], Run).value.tags == {"t": "a" * 10}


def test_dashes_and_underscores_are_alike_in_names() -> None:
    assert tree_of("--data-set.data-path", "a-b") == {"data_set": {"data_path": "a-b"}}


def test_flags_reach_any_depth_and_make_what_is_missing() -> None:
    assert tree_of("--a.b.c.d", "1", "--a.b.e", "2", given={"a": {"x": 0}}) == {
        "a": {"x": 0, "b": {"c": {"d": 1}, "e": 2}}
    }


def test_whole_numbers_in_a_name_are_the_keys_of_the_buckets() -> None:
    given = {"bucket_config": {"256px": {33: (1.0, 12), 65: (1.0, 6)}}}
    flags = ("--bucket_config.256px.33", "(1.0, 2)", "--bucket-config.256px_ar16:9.1", "(0.5, 7)")
    assert tree_of(*flags, given=given, schema=Run)["bucket_config"] == {
        "256px": {33: (1.0, 2), 65: (1.0, 6)},
        "256px_ar16:9": {1: (0.5, 7)},
    }


def test_a_number_in_a_name_is_text_where_the_keys_are_text() -> None:
    assert tree_of("--tags.33", "x", schema=Run) == {"tags": {"33": "x"}}
    assert tree_of("--a.33", "2", given={"a": {"33": 1}}) == {"a": {"33": 2}}


def test_quoted_parts_of_a_name_are_taken_literally() -> None:
    assert tree_of("--tags.\"a.b-c = 'd'\"=x", "--tags.'e'", "y") == {"tags": {"a.b-c = 'd'": "x", "e": "y"}}


def test_a_flag_alone_is_true_and_needs_a_key_that_can_be() -> None:
    assert tree_of("--wandb", "--lr", "1", schema=Run) == {"wandb": True, "lr": 1}
    assert tree_of("--wandb", "False", schema=Run) == {"wandb": False}
    assert rules_of("--steps", "--lr", schema=Run) == [
        "--steps: needs a value; write --steps value",
        "--lr: needs a value; write --lr value",
    ]


def test_the_last_of_two_flags_of_one_name_counts() -> None:
    assert tree_of("--x", "{'a': 1}", "--y", "1", "--x", "{'b': 2}") == {"y": 1, "x": {"b": 2}}


def test_a_dict_given_as_a_flag_merges_and_a_longer_name_is_laid_over_it() -> None:
    given = {"m": {"a": 1, "b": 1}}
    assert tree_of("--m", "{'b': 2}", "--m.c", "3", given=given) == {"m": {"a": 1, "b": 2, "c": 3}}
    assert tree_of("--m", "{'_delete_': True, 'c': 4}", given=given) == {"m": {"c": 4}}
    assert tree_of("--m._delete_", "True", "--m.c", "4", given=given) == {"m": {"c": 4}}
    assert tree_of("--m", "None", "--m.c", "4", given=given) == {"m": {"c": 4}}


def test_a_key_that_takes_a_list_takes_the_entries_of_all_its_flags() -> None:
    class Lists(Section):
        prompt: str | list[str] | None = None
        freeze: tuple[str, ...] = ()
        points: list[tuple[str, float]] | None = None
        level: float | tuple[float, ...] = 0.0
        betas: tuple[float, float] = (0.9, 0.99)

    def value(*flags: str) -> Lists:
        return resolve({}, flags, Lists).value

    assert value("--prompt", "a", "--freeze", "x", "--prompt", "['b', 'c']", "--prompt=[d").prompt == [*"abc", "[d"]
    assert value("--prompt", "a", "--prompt", "none", "--prompt", "b", "--prompt", "7").prompt == ["b", "7"]
    assert (value("--prompt", "7").prompt, value("--prompt", "a", "--prompt", "none").prompt) == ("7", None)
    assert (value("--freeze", "7").freeze, value("--freeze", "none", "--freeze", "x").freeze) == (("7",), ("none", "x"))
    assert value("--points", "('a', 1)", "--points", "[('b', 2)]").points == [("a", 1), ("b", 2)]
    assert (value("--level", "3").level, value("--level", "3", "--level", "4").level) == (3, (3, 4))
    assert value("--betas", "(0, 0)", "--betas", "(0.5, 0.5)").betas == (0.5, 0.5)


def test_the_notation_that_a_refusal_advises_can_be_typed() -> None:
    assert tree_of("--bucket_config", "dict()", "--tags", "dict(a='b')", schema=Run)["tags"] == {"a": "b"}
    assert tree_of("--x", "dict(t2v=1, head=dict(a=[1, 2]))") == {"x": {"t2v": 1, "head": {"a": [1, 2]}}}
    assert tree_of("--name", "dict(a=1)", schema=Run) == {"name": "dict(a=1)"}  # text where only text fits
    assert tree_of("--x", "dict(a=open('f'))") == {"x": "dict(a=open('f'))"}  # nothing is called


def test_a_value_that_starts_with_two_dashes_follows_an_equals_sign() -> None:
    assert tree_of("--x=--y") == {"x": "--y"}


@pytest.mark.parametrize("word", ["stray", "-x", "--", "--=1", "--a..b=1", "--a.=1", "--_base_=x", "--33=1", "--a b=1"])
def test_words_that_are_no_flags_are_refused(word: str) -> None:
    found = rules_of(word, "--ok", "1")
    assert len(found) == 1
    assert "command line" in found[0]


def test_a_flag_that_cannot_be_merged_is_a_fault_at_the_flag() -> None:
    found = rules_of("--lr.x", "1", "--m", "3", given={"lr": 1, "m": {"a": 1}})
    assert found[0].startswith("lr = {'x': 1} (--lr.x): cannot be a dict, because it is 1 in given")
    assert found[1].startswith("m = 3 (--m): must be a dict, because it is one in given")
