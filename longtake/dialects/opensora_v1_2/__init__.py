"""Open-Sora 1.2's command lines and run files, and those of Lambda's tutorial: `scripts/train.py`,
`scripts/inference.py` and `scripts/misc/search_bs.py` with the path of a run file and a fixed list of flags.

Each key acts, or a line names what Longtake does instead, or it is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from longtake.config.load import Heights
from longtake.config.tree import Branch
from longtake.contracts import UserError
from longtake.dialects.command_line import end_with_help
from longtake.dialects.names import refuse_typos
from longtake.dialects.opensora_v1_2.flags import read_flags, training_flags, typed_names
from longtake.dialects.opensora_v1_2.inference import inference_flags, translate_inference
from longtake.dialects.opensora_v1_2.keys import SCRIPTS, flags_of
from longtake.dialects.opensora_v1_2.places import run_file
from longtake.dialects.opensora_v1_2.search import search_flags, translate_search
from longtake.dialects.opensora_v1_2.tracking import translate_places
from longtake.dialects.opensora_v1_2.training import translate_training
from longtake.dialects.tiny_weights import leave_out_tiny_weights
from longtake.dialects.translation import Report, Say, SayOnce, Translation
from longtake.generate.config import GenerateConfig
from longtake.generate.read import OF_TRAINING
from longtake.presets import opensora_v1_2_preset
from longtake.system.tiny import take_tiny
from longtake.train.config import RunConfig

_EXAMPLES = {"train": "train/stage1.py", "generate": "inference/sample.py", "plan": "misc/bs.py"}


class OpenSoraV12:
    """The dialect of one command line, `["train" | "generate" | "plan", RUN, flags...]`; `say` gets each note on a key
    once, by default on stderr of the first process."""

    def __init__(self, say: Say | None = None) -> None:
        self._verb, self._say, self._tiny = "train", SayOnce(say), False
        self._preset: str | None = None  # that stands for a published file
        self._flags: list[str] = []
        self.typed_names: dict[str, str] = {}

    @classmethod
    def of_file(cls, tree: Mapping[str, Any], arguments: Sequence[str]) -> OpenSoraV12 | None:
        """Return the dialect for a run file of this tree that stands in another command line; None where it has no
        words of Open-Sora 1.2."""
        model = tree.get("model")
        if not isinstance(model, Mapping) or not str(model.get("type")).startswith("STDiT"):
            return None
        dialect = cls()
        dialect._verb, dialect._tiny = "train" if OF_TRAINING & tree.keys() else "generate", take_tiny(arguments)[1]
        return dialect

    def command(self, arguments: list[str]) -> list[str]:
        """Return the command line with RUN found. Raises `UserError` where RUN has no counterpart, and for flags
        that have none."""
        self._verb, *flags = arguments
        script, known = SCRIPTS[self._verb], list(flags_of(self._verb))
        end_with_help(f"{script} RUN", "Open-Sora 1.2", known, flags)
        flags, self._tiny = take_tiny(flags)
        run, given, others = read_flags(flags, self._verb)
        if self._verb != "plan":  # whose options are no keys of a config
            refuse_typos(others, known, script, RunConfig if self._verb == "train" else GenerateConfig)
        if run is None:
            raise UserError(
                f"{script}: the run file is missing; give one of your own, or one such as "
                f"configs/opensora-v1-2/{_EXAMPLES[self._verb]}"
            )
        file = run_file(run, self._verb, self._say)
        self._preset = Path(file).stem if file != run else None
        if self._verb == "plan":
            published = file != run and Path(run).stem == "bs"
            own = search_flags(file, given, others, published, self._tiny, self._say)
        else:
            to_flags = training_flags if self._verb == "train" else inference_flags
            own = to_flags(given, self._tiny, self._say)
            if self._verb == "train":
                self.typed_names |= typed_names(given)
        self._flags = [*own, *others]
        return [self._verb, file, *["--tiny"] * self._tiny, *own, *others]

    def find(self, path: Path) -> Path | None:
        """Return the preset in the place of one of Open-Sora's that is named as a base."""
        return opensora_v1_2_preset(path)

    def translate(self, tree: Branch, heights: Heights, report: Report) -> Branch:
        """Return the tree in Longtake's keys."""
        work = Translation(tree, heights, report, self._say)
        if self._tiny:
            leave_out_tiny_weights(work)
        if self._verb == "plan":
            translate_search(work, self._tiny)
        if self._verb == "train":
            translate_places(work, self._preset, self._flags)
        (translate_inference if self._verb == "generate" else translate_training)(work, self._tiny)
        self.typed_names |= work.typed_names
        return work.tree
