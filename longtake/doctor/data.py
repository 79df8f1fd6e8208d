"""Checks of what goes in: files beside their table, captions, the autoencoder, its latents."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch

from longtake.data.clips.transforms import to_unit
from longtake.data.clips.video import ClipError
from longtake.data.probing.one_file import probe_file
from longtake.doctor.case import Case
from longtake.doctor.finding import SEEN, Finding, left_out
from longtake.doctor.measures import change, psnr

_RATE = 0.05  # relative difference of frame rates; containers round 23.976 to 24 (0.1 %)
# Published autoencoders give 30 dB and more of natural clips; ours without weights give them exactly.
_GOOD_PSNR, _BAD_PSNR = 27.0, 20.0
# Scale factors make the standard deviation 1; clips of little contrast, and pixels as latents, have 0.2 to 0.6.
_SPREAD = 0.15, 2.5
_MOST_SHIFT = 2.0  # of the mean, in standard deviations: clips on one ground have up to 1.3


def files(case: Case) -> Finding:
    """What the table says of the clips, beside their files."""
    name, rows = "clips and their table", case.slot.rows.tolist()
    rates, sizes, seen = [], [], 0
    for row in dict.fromkeys(rows):
        path = case.table.location(row)
        if not Path(path).is_file():
            continue
        try:
            found = probe_file(path)
        except ClipError:
            continue  # what cannot be read is told by itself
        seen += 1
        said, own = float(case.table.fps[row]), found.fps
        if math.isfinite(said) and math.isfinite(own) and abs(said / own - 1) > _RATE:
            rates.append(f"{said:g} fps in the table, {own:g} in {Path(path).name}")
        numbers = {key: float(getattr(case.table, key)[row]) for key in ("num_frames", "height", "width")}
        for key, number in numbers.items():
            if math.isfinite(number) and number != getattr(found, key):
                sizes.append(f"{key} {number:g} in the table, {getattr(found, key)} in {Path(path).name}")
    again = "run `longtake data probe` again, and train on the table that it writes"
    if case.batch.faults:
        fault = case.batch.faults[0]
        figure = f"{len(case.batch.faults)} clips cannot be read ({fault.path}: {fault.reason})"
        return Finding(name, figure, "suspect", "clips cannot be read", "see docs/data.md, quarantine", 0.3)
    if rates:
        figure = f"{len(rates)} of {seen} differ in rate ({rates[0]})"
        return Finding(name, figure, "fault", "wrong frame rate: clips are read too fast or too slow", again, SEEN)
    if sizes:
        figure = f"sizes or lengths differ ({sizes[0]})"
        return Finding(name, figure, "fault", "the table is of other files", again, SEEN)
    return Finding(name, f"{seen} of {len(set(rows))} looked at agree") if seen else left_out(name, "no local files")


def captions(case: Case) -> Finding:
    """Whether captions, and what the text encoder makes of them, tell the clips apart."""
    name, texts = "captions", case.batch.text
    written = [" ".join((text,) if isinstance(text, str) else text) for text in texts]
    empty = sum(not case.table.caption(row).strip() for row in case.slot.rows.tolist())
    different = len(set(written))
    apart = [
        change(value[0], value[other])
        for value in case.text.values()
        for other in range(1, case.count)
        if written[other] != written[0]
    ]
    figure = f"{different} different among {case.count}, {empty} empty"
    if case.count < 2:
        return left_out(name, "one clip alone")
    if empty == case.count or different == 1:
        advice = "name the columns that hold them as dataset.captions, or write them into column text"
        return Finding(name, figure, "fault", "dead captions: all clips have the same, or none", advice, SEEN)
    if apart and max(apart) < 1e-6:
        advice = "the text encoder gives the same for all: check its weights and tokenizer"
        return Finding(name, figure + ", embedded alike", "fault", "dead captions: their text is lost", advice, SEEN)
    figure += f", embeddings {min(apart, default=0):.0%} apart or more"
    if empty > case.count / 2:
        return Finding(name, figure, "suspect", "most captions are empty", "caption the clips", 0.4)
    return Finding(name, figure)


def round_trip(case: Case) -> Finding:
    """Pixels through the autoencoder and back."""
    name = "autoencoder round trip"
    if case.system.encoders is None or not case.batch.video.numel():
        return left_out(name, "the run reads stored latents")
    frames = case.batch.bucket.shape[0]
    with torch.no_grad():
        decoded = torch.cat([case.system.autoencoder.decode(one[None], frames) for one in case.latents])
    found = psnr(decoded.cpu(), to_unit(case.batch.video))
    least, mean = float(found.min()), float(found.mean())
    figure = f"{mean:.1f} dB, the worst {least:.1f} dB"
    if math.isfinite(mean) and mean >= _GOOD_PSNR:
        return Finding(name, figure)
    for what, dim in {"colours from blue to red": 1, "frames from last to first": 2}.items():
        if (other := float(psnr(decoded.flip(dim).cpu(), to_unit(case.batch.video)).mean())) > max(
            _GOOD_PSNR, mean + 6
        ):
            figure, cause = f"{figure}; {other:.1f} dB with {what}", f"swapped by the autoencoder: {what}"
            return Finding(name, figure, "fault", cause, "encode and decode in one order, that of the weights", SEEN)
    video = to_unit(case.batch.video)
    grey = float(psnr(video.mean(dim=(2, 3, 4), keepdim=True).expand_as(video), video).mean())
    if not mean > grey:  # nor where it is not finite
        figure, cause = f"{figure}; {grey:.1f} dB with one colour", "the autoencoder gives back no picture"
        advice = "its weights are random or of another model: check ae.from_pretrained, ae.type and ae.dtype"
        return Finding(name, figure, "fault", cause, advice, SEEN)
    advice = "check ae.from_pretrained and its dtype: nothing sharper than this can be learned"
    verdict = "suspect" if mean >= _BAD_PSNR else "fault"
    return Finding(name, figure, verdict, "the autoencoder loses the picture", advice, SEEN - 0.1)


def spread(case: Case) -> Finding:
    """Scale and shift of the latents."""
    name, found = "scale and shift of latents", case.latents
    std, mean = float(found.std()), float(found.mean())
    of_channels = found.float().mean(dim=(0, 2, 3, 4))
    figure = f"standard deviation {std:.2f}, mean {mean:+.2f}, of channels {of_channels.min():+.2f} to "
    figure += f"{of_channels.max():+.2f}"
    if not np.isfinite(std):
        return Finding(name, figure, "fault", "latents are not finite", "compute ae.dtype in fp32", SEEN)
    low, high = _SPREAD
    if not low <= std <= high:
        advice = (
            f"write the scale that the weights were trained with: {case.scale_times(1 / max(std, 1e-9))} makes it 1"
        )
        return Finding(name, figure, "fault", "wrong scaling of latents", advice, 0.55)
    if abs(mean) > _MOST_SHIFT * std:
        return Finding(name, figure, "suspect", "latents are shifted", "check ae's shift_factor", 0.3)
    return Finding(name, figure)
