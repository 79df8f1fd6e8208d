"""What is wrong with a configuration, said so that it can be mended: place, value, rule, fix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from longtake.contracts import UserError

MAX_FAULTS = 100  # a broken file of a megabyte must not print a megabyte of faults
MAX_SHOWN = 80  # characters of a value that a fault shows


@dataclass(frozen=True)
class Fault:
    """One mistake in a configuration."""

    place: str  # `configs/x.py:3` or `--optim.lr`
    value: str  # the value or the text found there, as `shown` writes it; empty where there is none
    rule: str  # what it breaks: `must be a number`
    fix: str = ""  # what would be right: `write for example 1e-4`
    key: str = ""  # dotted name of the key, where the fault belongs to one

    def __str__(self) -> str:
        """Return the fault as one line: `optim.lr = "fast" (configs/x.py:3): must be a number; write for
        example 1e-4`."""
        subject = f"{self.key} = {self.value}" if self.key and self.value else self.key or self.value
        head = f"{subject} ({self.place})" if subject and self.place else subject or self.place
        text = f"{head}: {self.rule}" if head else self.rule
        return printable(f"{text}; {self.fix}" if self.fix else text)


class ConfigError(UserError):
    """All the mistakes found in a configuration, at once; its text has one line for each."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        assert faults, "an error needs a fault"
        self.faults = list(faults[:MAX_FAULTS])
        if len(faults) > MAX_FAULTS:
            self.faults.append(Fault("", "", "more faults were found, which are not shown; mend these first"))
        super().__init__("\n".join(str(fault) for fault in self.faults))

    @property
    def place(self) -> str:
        """The key of the first error, else its file or flag."""
        return self.faults[0].key or self.faults[0].place

    @property
    def found(self) -> str:
        """The value of the first error."""
        return self.faults[0].value

    @property
    def expected(self) -> str:
        """The rule that the first error breaks."""
        return self.faults[0].rule

    @property
    def fix(self) -> str:
        """What to write instead of the first error."""
        return self.faults[0].fix


def shown(value: object) -> str:
    """Return a value as a fault shows it: Python notation, text in double quotes, cut at 80 characters."""
    if isinstance(value, str):
        value = value if len(value) <= MAX_SHOWN else value[: MAX_SHOWN - 1] + "…"
        return quote(value)
    try:
        return shorten(repr(value))
    except ValueError:  # a number of more digits than Python prints
        return "a number too large to show"


def shorten(text: str) -> str:
    """Text on one line of at most 80 characters."""
    text = " ".join(text.split())
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"


def quote(text: str) -> str:
    """Return a Python literal of `text`, in double quotes unless it holds some: repr prefers double ones next
    to a `'`."""
    return repr(text) if '"' in text else '"' + repr("'" + text)[2:]


def printable(text: str) -> str:
    """Text without line breaks, other control characters and lone surrogates, which no terminal shows."""
    escaped = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return escaped.encode("utf-8", "backslashreplace").decode("utf-8")
