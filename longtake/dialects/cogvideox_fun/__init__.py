"""CogVideoX-Fun's command lines: `train_lora.py`, `train.py` and `train_control.py` with their own flags, and what
accelerate's launchers put into the environment.

Each flag acts, or a line names what Longtake does instead, or it is refused with the reason.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path

from longtake.config.load import Heights
from longtake.config.tree import Branch
from longtake.contracts import UserError
from longtake.dialects.cogvideox_fun.data import translate_data
from longtake.dialects.cogvideox_fun.keys import ROWS
from longtake.dialects.cogvideox_fun.launch import translate_launch
from longtake.dialects.cogvideox_fun.places import WHOLE, fault_of_folder, translate_model, translate_places
from longtake.dialects.cogvideox_fun.training import refuse_nothing_trained, translate_rates, translate_training
from longtake.dialects.command_line import FLAGS_ALONE, as_flag, end_with_help, refuse_stray, split
from longtake.dialects.names import refuse_typos
from longtake.dialects.table import arities_of, keys_of, lay_defaults, refuse_bare
from longtake.dialects.translation import Report, Say, SayOnce, Translation
from longtake.system.tiny import take_tiny
from longtake.train.config import RunConfig


class CogVideoXFun:
    """The dialect of one command line of a script, `["train", flags...]`; `say` gets each note on a key once, by
    default on stderr of the first process."""

    def __init__(self, script: str, say: Say | None = None) -> None:
        self._script, self._say, self._tiny = script, SayOnce(say), False
        self._flags = frozenset[str]()
        self.typed_names: dict[str, str] = {}

    def command(self, arguments: list[str]) -> list[str]:
        """Return the command line with RUN found. Raises `UserError` where a flag is missing that the script
        requires."""
        verb, *flags = arguments
        script, known = f"{self._script}.py", keys_of(ROWS, self._script)
        end_with_help(script, "CogVideoX-Fun", sorted(known), flags)
        flags, self._tiny = take_tiny(flags)
        given, groups = split(flags, arities_of(ROWS))
        others = list(chain(*groups))
        self._flags = frozenset(given)
        refuse_typos(others, known, script, RunConfig)
        rows = {row.key: row for row in ROWS}
        refuse_bare(given, rows)
        stray = [group[0] for group in groups if not group[0].startswith("-")]
        refuse_stray(flags, stray, [row.key for row in ROWS if row.takes == "nothing"])
        if "pretrained_model_name_or_path" not in given and not self._tiny:
            raise UserError(
                f"{script}: --pretrained_model_name_or_path is missing; give the folder of a CogVideoX, with "
                "scheduler, tokenizer, text_encoder, vae and transformer in it"
            )
        if not self._tiny:  # without it all else that is said of the model is wrong
            folder = "".join(given["pretrained_model_name_or_path"])
            if (rule := fault_of_folder(Path(folder).expanduser())) is not None:
                raise UserError(f"--pretrained_model_name_or_path {folder}: {rule}; {WHOLE}")
        if "train_data_meta" not in given and not any(word.startswith("--dataset.") for word in others):
            raise UserError(f"{script}: --train_data_meta is missing; give the .json or .csv that lists the clips")
        own = [
            as_flag(key, values, is_text=rows[key].takes == "text", is_list=rows[key].takes == "list")
            for key, values in given.items()
        ]
        return [verb, str(FLAGS_ALONE), *["--tiny"] * self._tiny, *own, *others]

    def find(self, path: Path) -> Path | None:
        """No file of CogVideoX-Fun is a base of run files."""
        return None

    def translate(self, tree: Branch, heights: Heights, report: Report) -> Branch:
        """Return the tree in Longtake's keys."""
        work = Translation(tree, heights, report, self._say, self._flags)
        known = keys_of(ROWS, self._script)
        for key in keys_of(ROWS):
            if key not in known and (node := work.take(key)) is not None:
                work.refuse(key, node, f"is not a flag of {self._script}.py", "leave it out")
        lay_defaults(work, [row for row in ROWS if row.key in known])
        control = self._script == "train_control"
        visual = translate_model(work, control, self._tiny)
        translate_places(work)
        translate_launch(work)
        translate_rates(work)
        translate_data(work, visual, self._tiny)
        if self._script != "train_lora" and work.is_whole:
            refuse_nothing_trained(work)
        translate_training(work, self._script, self._tiny)
        self.typed_names |= work.typed_names
        return work.tree
