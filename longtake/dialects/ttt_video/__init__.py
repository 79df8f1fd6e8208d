"""TTT-Video's command lines: `train.py`, `train_submitit.py` and `sample.py` with `--job.config_file FILE.toml` and
`--section.key value`.

Each key acts, or a line names what Longtake does instead, or it is refused with the reason.
"""

from __future__ import annotations

from pathlib import Path

from longtake.config.load import Heights
from longtake.config.tree import Branch
from longtake.contracts import UserError
from longtake.dialects.command_line import FLAGS_ALONE, end_with_help
from longtake.dialects.names import refuse_typos
from longtake.dialects.table import keys_of
from longtake.dialects.translation import Report, Say, SayOnce, Translation
from longtake.dialects.ttt_video.keys import CONFIG_FILE, read_flags, rows_of
from longtake.dialects.ttt_video.sampling import translate_sampling
from longtake.dialects.ttt_video.shared import check_keys, drop_keys, lay_preset, translate_model
from longtake.dialects.ttt_video.training import translate_training
from longtake.generate.config import GenerateConfig
from longtake.system.tiny import take_tiny
from longtake.train.config import RunConfig

_SCRIPTS = {"train": "train.py", "generate": "sample.py"}


class TTTVideoDialect:
    """The dialect of one command line, `["train" | "generate", flags...]`; `say` gets each note on a key once, by
    default on stderr of the first process."""

    def __init__(self, say: Say | None = None) -> None:
        self._verb, self._say, self._tiny = "train", SayOnce(say), False
        self._flags: dict[str, str] = {}
        self.typed_names: dict[str, str] = {}

    def command(self, arguments: list[str]) -> list[str]:
        """Return the command line with RUN found. Raises `UserError` where what must be given is missing."""
        self._verb, *flags = arguments
        script = _SCRIPTS[self._verb]
        known = [CONFIG_FILE, *keys_of(rows_of(self._verb))]
        end_with_help(script, "TTT-Video", known, flags)
        flags, self._tiny = take_tiny(flags)
        run, self._flags, others = read_flags(flags, self._verb)
        refuse_typos(others, known, script, RunConfig if self._verb == "train" else GenerateConfig)
        if run is not None and not Path(run).is_file():
            raise UserError(f"--{CONFIG_FILE} {run}: there is no such file; give one of configs/, or of your own")
        return [self._verb, run or str(FLAGS_ALONE), *["--tiny"] * self._tiny, *self._flags.values(), *others]

    def find(self, path: Path) -> Path | None:
        """No file of TTT-Video is a base of run files."""
        return None

    def translate(self, tree: Branch, heights: Heights, report: Report) -> Branch:
        """Return the tree in Longtake's keys."""
        work = Translation(tree, heights, report, self._say, self._flags)
        rows = rows_of(self._verb)
        check_keys(work, rows)
        preset = lay_preset(work, "train" if self._verb == "train" else "inference", self._tiny)
        if self._verb == "train":
            translate_training(work, preset, self._tiny)
        else:
            translate_sampling(work, self._tiny)
        translate_model(work, self._tiny)
        drop_keys(work, rows)
        self.typed_names |= work.typed_names
        return work.tree
