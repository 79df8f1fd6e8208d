"""Captions that are longer than a text encoder takes, counted before a run and named in a generation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from longtake.contracts import Caption, UserError
from longtake.data.clips.captions import captions_in, single_caption
from longtake.data.loading.captions import written_caption
from longtake.data.probing.embedded import embedded_clips
from longtake.data.tables.mix import MixedTable
from longtake.data.tables.table import ClipTable
from longtake.encoders.config import WordsConfig
from longtake.encoders.files import local_encoder
from longtake.encoders.text import TextEncoder, open_tokens
from longtake.encoders.tokens import CaptionTokens
from longtake.encoders.word_vectors import WordTokens
from longtake.system.config import SystemConfig
from longtake.system.encoders import CaptionCounts, flat_captions

MOST_CAPTIONS = 10_000  # that are counted: a tokenizer takes about 0.2 ms for one of 100 words
_SHOWN_LETTERS = 200  # of the words that a prompt loses


def open_counts(config: SystemConfig) -> CaptionCounts:
    """Open the token counter of each text encoder, by section of the config; None where its files are not on this
    machine."""
    found: dict[str, TextEncoder | CaptionTokens | WordTokens | None] = {}
    for text in config.family.texts:
        section = getattr(config, text.section)
        if isinstance(section, WordsConfig):
            found[text.section] = WordTokens(section.max_length)
            continue
        folder = local_encoder(section.from_pretrained, section.cache_dir)
        try:
            found[text.section] = None if folder is None else open_tokens(section, folder, text.section)
        except UserError:  # whatever builds the encoder gives the reason
            found[text.section] = None
    return found


def caption_length_lines(
    config: SystemConfig, table: ClipTable | MixedTable, counts: CaptionCounts | None = None
) -> list[str]:
    """For the report before the first step and `data stats`: how many captions are too long, by how much, for which
    encoder, and which cells hold several captions where the model takes one.

    Of more than `MOST_CAPTIONS` rows as many are counted, evenly spread. counts: as `open_counts` gives them. Lists of
    embedded clips have no captions.
    """
    if embedded_clips(table.source) is not None:
        return []
    counts = open_counts(config) if counts is None else counts
    rows = np.unique(np.linspace(0, len(table) - 1, min(len(table), MOST_CAPTIONS)).astype(np.int64)).tolist()
    written, faults = [], []
    for row in rows:
        try:
            written += _captions_of(config, table, row)
        except ValueError as error:
            faults.append(f"{table.written_path(row)}: {error}")
    sample = "" if len(rows) == len(table) else f" (of {len(rows):,} clips, evenly spread)"
    lines = []
    if faults:
        lines.append(f"warning: captions: {len(faults):,} clips cannot be used{sample}; the first: {faults[0]}")
    for section, counter in counts.items():
        max_length = getattr(config, section).max_length
        if counter is None:
            lines.append(f"captions: {section} takes {max_length} tokens; its tokenizer is not here, none are counted")
            continue
        longer = [found for text in written if (found := counter.overflow(text)) is not None]
        if longer:
            excess = [found.length - max_length for found in longer]
            count = (
                f"{len(longer):,} of {len(written):,}{sample} are longer than the {max_length} tokens that {section}"
            )
            lines.append(
                f"warning: captions: {count} takes, by {int(np.median(excess))} (median) to {max(excess)}; what comes "
                f"last before rate and score is cut: shorten them, or raise {section}.max_length if the model allows it"
            )
    return lines


def lost_words(config: SystemConfig, counts: CaptionCounts, prompts: Sequence[Caption]) -> list[str]:
    """Return a line for each prompt and encoder that cuts it, with the words that are lost. `counts`: by section."""
    lines = []
    for text in dict.fromkeys(flat_captions(prompts)):
        for section, counter in counts.items():
            if counter is not None and (found := counter.overflow(text)) is not None:
                lost = found.lost[:_SHOWN_LETTERS] + ("..." if len(found.lost) > _SHOWN_LETTERS else "")
                lines.append(
                    f"prompt {text[:40]!r}...: has {found.length} tokens, {section} takes {found.max_length}; "
                    f"it does not read {lost!r}"
                )
    return lines


def _captions_of(config: SystemConfig, table: ClipTable | MixedTable, row: int) -> Iterator[str]:
    """All captions of a row, as a run writes them. Raises `ValueError` where a cell holds several and one is needed."""
    dataset, rules = config.dataset, config.sample_rules
    fps = float(table.fps[row])
    rate = min(fps, dataset.fps_max) if dataset.fps_max and np.isfinite(fps) else fps
    found = []
    for column in dataset.captions or ("text",):
        cell = table.caption(row, column)
        if cell:
            parts = captions_in(cell) if rules.segments is not None else [single_caption(cell)]
            found += [written_caption(dataset, table, rules, part, row, rate) for part in parts]
    return iter(found)
