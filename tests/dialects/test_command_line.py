"""Which arguments belong to which flag, and how they are written for Longtake."""

from __future__ import annotations

import pytest

from longtake.dialects.command_line import MANY, as_flag, split

ARITIES = {"one": 1, "two": 2, "many": MANY, "switch": 0, "long_name": 1}


@pytest.mark.parametrize(
    ("words", "given", "others"),
    [
        ("--one a b", {"one": ["a"]}, [["b"]]),
        ("--one=a b", {"one": ["a"]}, [["b"]]),
        ("--one --two 1 2 3", {"one": [], "two": ["1", "2"]}, [["3"]]),
        ("--many a -b c --switch d", {"many": ["a", "-b", "c"], "switch": []}, [["d"]]),
        ("--switch=False --one a --one b", {"switch": ["False"], "one": ["b"]}, []),
        ("--long-name a", {"long_name": ["a"]}, []),
        (
            "run.py --unknown a b --bare --other=c d",
            {},
            [["run.py"], ["--unknown", "a"], ["b"], ["--bare"], ["--other=c"], ["d"]],
        ),
    ],
)
def test_arguments_go_to_their_flags(words: str, given: dict[str, list[str]], others: list[list[str]]) -> None:
    assert split(words.split(), ARITIES) == (given, others)


def test_text_stays_text_and_lists_stay_whole() -> None:
    assert as_flag("x", ["1e-5"]) == "--x=1e-5"
    assert as_flag("x", ["1e-5"], is_text=True) == "--x='1e-5'"
    assert as_flag("x", ["None"], is_text=True) == "--x=None"
    assert as_flag("x", [""], is_text=True) == "--x=''"
    assert as_flag("x", []) == "--x=True"
    assert as_flag("x", ["a", "b"], is_list=True) == "--x=['a', 'b']"
