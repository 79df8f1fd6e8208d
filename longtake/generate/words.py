"""The command line of `longtake generate`: its short flags, in the words of the config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
        """Puts keys in place of short flags, in the order that they were written."""
        return cls(tuple(_long(word) for word in words if word != TINY), TINY in words)


def _long(word: str) -> str:
    name, equals, value = word.partition("=")
    key = SHORT.get(name.removeprefix("--").replace("-", "_")) if name.startswith("--") else None
    return f"--{key}{equals}{value}" if key else word
