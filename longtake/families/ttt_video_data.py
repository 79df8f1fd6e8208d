"""What TTT-Video's own program trains on: a JSONL of embedded clips, see `data.probing.embedded`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longtake.contracts import UserError
from longtake.data.latents.source import EncoderFacts, ListedLatents, UnusableLatents, single_tensor
from longtake.data.probing.embedded import TEXTS, VIDEO, Embedded, embedded_clips, list_of
from longtake.data.tables.mix import MixedTable
from longtake.data.tables.table import ClipTable

_MOST_FAULTS = 10  # listed in one error


def open_embeddings(config: Any, table: ClipTable | MixedTable) -> ListedLatents:
    """Return the latents and texts of the clips of a run, whose table is the list, or a mix of such lists. Raises
    `UserError` that names the lines which are of other segments, frames, texts or sizes than the run trains."""
    lines: list[Mapping[str, Any]] = []
    faults: list[str] = []

    tables = table.tables if isinstance(table, MixedTable) else (table,)
    for clips in tables:
        if (found := embedded_clips(clips.source)) is None:
            raise UserError(
                f"dataset.latents = {config.dataset.latents!r}: the clips are those of {clips.source}; write the list "
                "as dataset.data_path too"
            )
        faults += [f"{list_of(clips.source)}:{one.line}: {fault}" for one in found for fault in faults_of(config, one)]
        for row, one in enumerate(found):
            # absolute, because the source joins relative names to the list's folder
            texts = [os.path.abspath(clips.location_of(row, name)) for name in json.loads(one.text)]
            lines.append({VIDEO: os.path.abspath(clips.location(row)), TEXTS: texts})
    if faults:
        more = f"; and {len(faults) - _MOST_FAULTS} more" if len(faults) > _MOST_FAULTS else ""
        folders = ", ".join(dict.fromkeys(str(clips.root) for clips in tables))
        raise UserError(
            f"{'; '.join(faults[:_MOST_FAULTS])}{more} (files are those of {folders}); fix these lines, or train other "
            "sizes"
        )
    facts = EncoderFacts(config.ae.latent, config.text_length, {}, posterior=config.ae.is_random)
    of_latents = {name: {"dtype": "float32", "shape": list("CFhw")} for name in ("mean", "std")[: 1 + facts.posterior]}
    source = ListedLatents(
        Path(config.dataset.latents), lines, facts, of_latents, {}, _Moments(config.ae.scale), read_texts
    )
    first = _first_text(source)
    of_texts = {"text": {"dtype": str(first.dtype).removeprefix("torch."), "shape": list(first.shape[1:])}}
    return ListedLatents(source.path, lines, facts, of_latents, of_texts, source.read_latents, read_texts)


def _first_text(source: ListedLatents) -> Tensor:
    """[segments, L, D] of the first line whose texts can be used. Raises `UserError` without one."""
    reason = "no line"
    for row in range(len(source.lines)):
        try:
            return source.texts(row, "")["text"]
        except UnusableLatents as error:
            reason = str(error)
    raise UserError(f"{source.path}: the texts of no line can be used ({reason}); embed them again")


def faults_of(config: Any, clip: Embedded) -> Iterator[str]:
    """What of a clip does not fit the run."""
    latent, shapes = config.ae.latent, {bucket.shape for bucket in config.bucket_rule.buckets}
    shape = latent.pixel_frames(clip.latent_frames), clip.rows * latent.spatial, clip.columns * latent.spatial
    needed, count = config.sample_rules.segments(shape[0]), len(json.loads(clip.text))
    if clip.channels != 2 * latent.channels:
        yield (
            f"{VIDEO} has {clip.channels} channels ({clip.video_shape}), and the moments of the latents "
            f"{2 * latent.channels}"
        )
    if shape not in shapes:
        sizes = ", ".join("x".join(map(str, one)) for one in sorted(shapes))
        yield f"{VIDEO} is of {'x'.join(map(str, shape))} pixels ({clip.video_shape}), and the run trains {sizes}"
    if count != needed:
        yield f"{TEXTS} has {count} files, and {shape[0]} frames have {needed} segments"
    if clip.text_tokens != config.text_length:
        yield (
            f"{TEXTS} has texts of {clip.text_tokens} tokens ({clip.text_shape}), and t5.max_length is "
            f"{config.text_length}"
        )
    if clip.text_width != (width := config.model.text_embed_dim):
        yield f"{TEXTS} has tokens of width {clip.text_width} ({clip.text_shape}), and model.text_embed_dim is {width}"


class _Moments:
    """Reads a clip's latents: [F, 2 C, h, w], means and log-variances."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, line: Mapping[str, Any], load: Callable[[str], Any]) -> dict[str, Tensor]:
        mean, logvar = single_tensor(line[VIDEO], load(line[VIDEO])).float().transpose(0, 1).contiguous().chunk(2)
        return {"mean": mean * self.scale, "std": (0.5 * logvar.clamp(-30.0, 20.0)).exp() * self.scale}


def read_texts(line: Mapping[str, Any], load: Callable[[str], Any]) -> dict[str, Tensor]:
    """[segments, L, D], float64 as float32."""
    text = torch.stack([single_tensor(name, load(name)) for name in line[TEXTS]])
    return {"text": text.float() if text.dtype == torch.float64 else text}
