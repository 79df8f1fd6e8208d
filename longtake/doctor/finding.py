"""What a check has found, and the order of the causes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "suspect", "fault", "left out"]
UNTRAINED = "nothing is trained yet"  # why what a model makes of clips is left out
_GRAVITY = {"fault": 0, "suspect": 1}

# Weights, so that a cause comes before its consequences: what was read off (files, weights), what makes the model good
# when it is changed (`EXPLAINS` and up to as much again by how good), a model worse than the one it was trained from
# (before faults of the data, for both models saw the same), what else training shows, and mere symptoms.
SEEN, EXPLAINS, SPOILED, TRAINED, SYMPTOM = 1.0, 0.6, 0.59, 0.5, 0.2


@dataclass(frozen=True)
class Finding:
    """One check: its figure, and what that says."""

    name: str
    figure: str
    verdict: Verdict = "ok"
    cause: str = ""  # of what is not ok
    advice: str = ""  # what to do
    weight: float = 0.0  # how strongly the figure speaks for the cause, 0 to 1


def left_out(name: str, why: str) -> Finding:
    return Finding(name, why, "left out")


def ranked(findings: Iterable[Finding]) -> list[Finding]:
    """What is not ok, the likeliest cause first."""
    ill = [one for one in findings if one.verdict in _GRAVITY]
    return sorted(ill, key=lambda one: (_GRAVITY[one.verdict], -one.weight))
