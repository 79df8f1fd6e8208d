"""The command line of `longtake generate`: its short flags, in the words of the config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from longtake.contracts import UserError
from longtake.system.tiny import TINY

# Short flag -> the key it stands for. A name behind `--lora.` is a key of that section as it is.
SHORT = {
    "resolution": "sampling_option.resolution",
    "aspect_ratio": "sampling_option.aspect_ratio",
    "num_frames": "sampling_option.num_frames",
    "num_steps": "sampling_option.num_steps",
    "guidance": "sampling_option.guidance",
    "guidance_img": "sampling_option.guidance_img",
    "seed": "sampling_option.seed",
    "lora": "lora.from_pretrained",
    "lora_scale": "lora.strength",
}


@dataclass(frozen=True)
class Words:
    """What stands behind RUN: flags of the config, and whether the run is to be tiny."""

    overrides: tuple[str, ...]
    tiny: bool = False

    @classmethod
    def read(cls, words: Sequence[str]) -> Words:
        """Puts keys in place of short flags, in the order that they were written.

        Raises `UserError` where a short flag and its key are both given, with different values.
        """
        _refuse_two_spellings([word for word in words if word != TINY])
        return cls(tuple(_long(word) for word in words if word != TINY), TINY in words)


def _long(word: str) -> str:
    name, equals, value = word.partition("=")
    key = SHORT.get(name.removeprefix("--").replace("-", "_")) if name.startswith("--") else None
    return f"--{key}{equals}{value}" if key else word


def _refuse_two_spellings(words: Sequence[str]) -> None:
    given: dict[str, dict[str, str]] = {}  # key -> how it is spelled -> its last value
    for word, following in zip(words, [*words, "--"][1:], strict=True):
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            plain = name.removeprefix("--").replace("-", "_")
            value = value if equals or following.startswith("--") else following
            given.setdefault(SHORT.get(plain, plain), {})[plain] = value
    for spellings in given.values():
        if len(set(spellings.values())) > 1:
            (first, one), (second, other) = spellings.items()
            raise UserError(f"--{first} {one}: stands for the same key as --{second} {other}; keep one of the two")
