"""A clip's caption as a run writes it: with the prefix of its table, and its rate and scores in the family's form."""

from __future__ import annotations

from longtake.data.clips.captions import caption, prefixed
from longtake.data.config import DatasetConfig
from longtake.data.rules import SampleRules
from longtake.data.tables.mix import MixedTable
from longtake.data.tables.table import ClipTable


def written_caption(
    config: DatasetConfig, table: ClipTable | MixedTable, rules: SampleRules, text: str, row: int, rate: float
) -> str:
    """Return the caption of a row whose `text` is one of its cells, or a part of one; `rate` as the model sees it."""
    score = table.motion_score[row] if config.vmaf else None
    facts = {"source_fps": table.fps[row], "fps_max": config.fps_max}
    facts |= {column: table.caption(row, column) for column in rules.facts}
    return caption(prefixed_caption(config, table, text, row), rate, score, rules.caption, facts=facts)


def prefixed_caption(config: DatasetConfig, table: ClipTable | MixedTable, text: str, row: int) -> str:
    """Return a caption with the `caption_prefix` of the table that its row is of."""
    prefix = config.caption_prefix
    if not isinstance(prefix, str):
        is_mix = config.mix is not None and isinstance(table, MixedTable)
        name = config.mix[table.number_of(row)][0] if is_mix else config.data_path
        prefix = prefix.get(str(name), "")
    return prefixed(text, prefix) if prefix else text
