"""Command lines of other systems: which arguments belong to which flag, and how Longtake's config takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from textwrap import fill

from longtake.config.faults import shown
from longtake.contracts import UserError

MANY = 10**6  # arguments of a flag that takes a list
FLAGS_ALONE = Path(__file__).with_name("flags_alone.toml")  # the run file of command lines that name none


def split(
    arguments: Sequence[str],
    arities: Mapping[str, int],
    plain: Callable[[str], str] = lambda name: name.replace("-", "_"),
) -> tuple[dict[str, list[str]], list[list[str]]]:
    """Return the known flags by name, with their arguments, and all else: flags of others with the word behind them,
    and words by themselves. Of two flags of one name the later counts.

    arities: name -> most arguments. plain: the spelling of a name that `arities` has.
    """
    given: dict[str, list[str]] = {}
    others: list[list[str]] = []
    left = list(arguments)
    while left:
        word = left.pop(0)
        if not word.startswith("--"):
            others.append([word])
            continue
        name, equals, text = word.removeprefix("--").partition("=")
        known = arities.get(plain(name))
        values = [text] if equals else []
        most = known if known is not None else int(not equals)
        while left and len(values) < most and not left[0].startswith("--"):
            values.append(left.pop(0))
        if known is not None:
            given[plain(name)] = values
        else:
            others.append([word] if equals else [word, *values])
    return given, others


def refuse_stray(arguments: Sequence[str], words: Sequence[str], alone: Iterable[str]) -> None:
    """Raise `UserError` for a word that directly follows a flag that takes none. words: those of `arguments` that are
    no flag's; alone: the names of such flags."""
    names = set(alone)
    for word in words:
        before = arguments[max(arguments.index(word) - 1, 0)]
        if before.startswith("--") and before.removeprefix("--").replace("-", "_") in names:
            raise UserError(f"{before} {shown(word)}: the flag takes no value; write {before} alone, or leave it out")


def as_flag(name: str, values: Sequence[str], is_text: bool = False, is_list: bool = False) -> str:
    """One flag `--name=value`, in which a text stays a text whatever it looks like; without a value it is True."""
    if is_list:
        return f"--{name}={list(values)!r}"
    if not values:
        return f"--{name}=True"
    return f"--{name}={values[0]!r}" if is_text and values[0].lower() != "none" else f"--{name}={values[0]}"


def end_with_help(script: str, system: str, names: Iterable[str], flags: Sequence[str]) -> None:
    """Print a script's own flags and exit, where help is asked for."""
    if "--help" in flags or "-h" in flags:
        print(f"{script}: flags of {system}'s own, as docs/migrating.md explains them:")
        print(fill(" ".join(f"--{name}" for name in names), 110, break_on_hyphens=False))
        raise SystemExit(0)
