"""Random configurations: plain trees, and trees with `_delete_` and None for merging."""

from __future__ import annotations

from keyword import iskeyword
from typing import Any

from hypothesis import strategies as st

NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,5}", fullmatch=True).filter(lambda name: not iskeyword(name))
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)  # what a file can hold
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    TEXT,
)
LEAVES = (
    SCALARS | st.lists(SCALARS, max_size=4) | st.tuples(SCALARS) | st.lists(st.tuples(SCALARS, SCALARS), max_size=3)
)
KEYS = st.integers(-(10**6), 10**6) | TEXT.filter(lambda key: key != "_delete_")


def dicts(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[Any, Any]]:
    """Dicts without two keys that name the same entry."""
    return st.dictionaries(KEYS, values, max_size=4).filter(lambda made: len({str(key) for key in made}) == len(made))


def trees() -> st.SearchStrategy[dict[str, Any]]:
    """Configurations without marks: names at the top, any keys below."""
    return st.dictionaries(NAMES, st.recursive(LEAVES, dicts, max_leaves=8), max_size=4)


def marked_trees() -> st.SearchStrategy[dict[str, Any]]:
    """Small configurations that often meet each other, with `_delete_` and None."""
    keys = st.sampled_from(["a", "b", 3, "_delete_"])

    def whole(made: dict[Any, Any]) -> dict[Any, Any]:
        return {key: True if key == "_delete_" else value for key, value in made.items()}

    values = st.recursive(
        st.none() | st.integers(0, 2), lambda inner: st.dictionaries(keys, inner, max_size=3).map(whole), max_leaves=6
    )
    return st.dictionaries(st.sampled_from(["x", "y"]), values, max_size=2)
