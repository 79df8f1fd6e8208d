"""Lines of a text file of prompts: comments, and options behind the prompt in musubi-tuner's notation,
`a cat --w 832 --h 480 --f 81 --d 42 --s 20 --l 6 --n blurry --i cat.png`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

_NUMBERS = {"d": ("seed", int), "f": ("num_frames", int), "s": ("num_steps", int)}
_NUMBERS |= {"g": ("guidance", float), "l": ("guidance", float)}
_SIDES = ("h", "w")
_REFS = ("i", "ei")  # the first frame, the last frame
_ELSEWHERE = {
    "fs": "the shift of the schedule is of the whole generation: the keys of objective",
    "cn": "control videos are in a .csv, in the model's column for them",
    "ci": "control images are in a .csv, in the model's column for them",
    "of": "there is no such option",
}
# behind white space; `--` alone, or in front of a longer word, is the prompt's
_OPTION = re.compile(r"\s--(?=[a-z]{1,2}(?:\s|$)|[a-z_-]+[ =]\S+\s*$)")


@dataclass
class PromptLine:
    """One prompt of a text file and what its options say."""

    text: str
    negative: str | None = None
    refs: tuple[str, ...] = ()
    options: list[tuple[str, Any]] = field(default_factory=list)


def is_comment(line: str) -> bool:
    """Return True where a line is empty or begins with `#`."""
    return not line.strip() or line.lstrip().startswith("#")


def has_options(text: str) -> bool:
    """Return True where options stand behind a prompt."""
    return _OPTION.search(text) is not None


def read_line(line: str, number: int, faults: list[str]) -> PromptLine:
    """Return the prompt of a line; what is wrong with its options is appended to `faults` with the line's number."""
    text, *parts = _OPTION.split(f" {line.strip()}")
    prompt = PromptLine(text.strip())
    values: dict[str, str] = {}
    for part in parts:
        name, _, value = part.partition(" ")
        values[name] = value.strip()
    if parts and not prompt.text:
        faults.append(f"line {number}: there is no prompt in front of its options")
    for name, value in values.items():
        if name in _NUMBERS:
            _add_number(prompt, name, value, number, faults)
        elif name == "n":
            prompt.negative = value or None
        elif name in _REFS and not value:
            faults.append(f"line {number}: --{name} names no file")
        elif name not in (*_SIDES, *_REFS):
            known = ", ".join(f"--{option}" for option in (*_NUMBERS, *_SIDES, "n", *_REFS))
            why = _ELSEWHERE.get(name, f"is not an option of a prompt ({known} are; a .csv has columns for more)")
            faults.append(f"line {number}: --{name}: {why}")
    prompt.refs = tuple(values[name] for name in _REFS if values.get(name))
    if sides := [name for name in _SIDES if name in values]:
        size = [values.get(name, "") for name in _SIDES]
        if all(side.isdecimal() for side in size):
            prompt.options.append(("resolution", "x".join(size)))
        else:
            faults.append(f"line {number}: --{sides[0]} {values[sides[0]]}: expected --w and --h, two whole numbers")
    return prompt


def _add_number(prompt: PromptLine, name: str, text: str, number: int, faults: list[str]) -> None:
    key, kind = _NUMBERS[name]
    try:
        prompt.options.append((key, kind(text)))
    except ValueError:
        wanted = "a whole number" if kind is int else "a number"
        faults.append(f"line {number}: --{name} {text}: expected {wanted}")
