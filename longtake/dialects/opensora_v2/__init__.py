"""Open-Sora 2.0's command lines and run files.

What has another name, unit or place here is translated, what is not needed is answered with a line that says what
stands in its place, and what has no counterpart is refused.
"""

from __future__ import annotations

from pathlib import Path

from longtake.config.load import Heights
from longtake.config.tree import Branch
from longtake.dialects.opensora_v2.disk import place_clips, place_encoders, place_weights
from longtake.dialects.opensora_v2.inference import translate_inference
from longtake.dialects.opensora_v2.places import one_word, run_file
from longtake.dialects.opensora_v2.training import translate_training
from longtake.dialects.tiny_weights import leave_out_tiny_weights
from longtake.dialects.translation import Report, Say, SayOnce, Translation
from longtake.presets import opensora_v2_preset
from longtake.system.tiny import TINY


class OpenSora:
    """The dialect of one command line, `["train" | "generate", RUN, flags...]`; `say` gets each note on a key once, by
    default on stderr of the first process."""

    def __init__(self, say: Say | None = None) -> None:
        self._verb, self._say, self._tiny = "train", SayOnce(say), False
        self.typed_names: dict[str, str] = {}

    def command(self, arguments: list[str]) -> list[str]:
        """Return the command line with RUN found. Raises `UserError` where RUN is a file of Open-Sora that is
        not here."""
        self._verb, self._tiny = arguments[0], TINY in arguments
        if len(arguments) < 2 or arguments[1].startswith("-"):
            return arguments
        run, flags = run_file(arguments[1], self._say)
        return [self._verb, run, *flags, *one_word(arguments[2:], self._say)]

    def find(self, path: Path) -> Path | None:
        """Return the preset in the place of one of Open-Sora's that is named as a base."""
        return opensora_v2_preset(path)

    def translate(self, tree: Branch, heights: Heights, report: Report) -> Branch:
        """Return the tree in Longtake's keys."""
        work = Translation(tree, heights, report, self._say)
        if self._verb == "generate":
            translate_inference(work)
        else:
            translate_training(work)
            place_clips(work)
        if self._tiny:
            leave_out_tiny_weights(work)
        place_weights(work)
        place_encoders(work)
        self.typed_names |= work.typed_names
        return work.tree
