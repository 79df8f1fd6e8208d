"""Checks of a generation's requests, made before a model is built."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from longtake.contracts import UserError
from longtake.data.clips.video import ClipError
from longtake.diffusion.known import ONE_REF, Window
from longtake.generate.config import GenerateConfig
from longtake.generate.options import own_config
from longtake.generate.prompts import MAX_NAME_BYTES, TABLE_FIX, Prompt, in_one_sentence
from longtake.generate.references import frame_numbers, reference_faults
from longtake.generate.requests import (
    brought_file,
    companions_of,
    kind_of,
    prompts_of,
    ratio_of,
    refs_taken,
    shape_of,
    strength_of,
    whole_clip,
    windows_taken,
)
from longtake.generate.sample import edited, in_segments
from longtake.models.config import LOW_NOISE_KEY
from longtake.system.encoders import find_encoders, missing_files, raise_missing
from longtake.system.pretrained import open_pretrained


def check_request(config: GenerateConfig) -> list[str]:
    """Raise `UserError`, before a model is built, for impossible requests and missing files, all faults at once, by
    the prompts, the references and the headers of the weights. Returns warnings, one line each."""
    faults: list[str] = []
    prompts = prompts_of(config, faults)
    _check_names(prompts, config)
    stills = (config.of_stills(),) if config.use_t2i2v else ()
    for part in (config, *stills):
        part.check_shape(*shape_of(part))
    faults += prompt_faults(prompts, config)
    if faults:
        place = "" if config.prompts is None else f"prompts = {config.prompts!r}"
        raise in_one_sentence(place, faults, "name other files" if config.prompts is None else TABLE_FIX)
    doubts = list(dict.fromkeys(_cut_references(prompts, config)))
    doubts += _unread_negatives(prompts, config)
    raise_missing([fault for part in (config, *stills) for fault in missing_files(part)])
    doubts += _check_weights(config, prompts) + [line for part in stills for line in _check_weights(part, ())]
    for part in (config, *stills):  # last, since this downloads from the hub
        find_encoders(part)
    return doubts


def _unread_negatives(prompts: Sequence[Prompt], config: GenerateConfig) -> list[str]:
    """Return a line where negative prompts are written and no branch of guidance reads them."""
    unread: dict[str, list[int]] = {}
    for prompt in prompts:
        option = own_config(prompt, config).sampling_option
        if option.method == "distill":
            why = 'sampling_option.method = "distill", which has no branches'
        elif option.guidance == 1 and option.guidance_low in (None, 1):
            why = "sampling_option.guidance = 1, the prompt alone"
        else:
            continue
        if any(clip.negative or config.negative_prompt for clip in prompt.clips):
            unread.setdefault(why, []).append(prompt.row + 1)
    return [
        f"negative_prompt: is not read at {why}" + (f" (rows {rows[0]} to {rows[-1]})" if config.prompts else "")
        for why, rows in unread.items()
    ]


def _check_names(prompts: Sequence[Prompt], config: GenerateConfig) -> None:
    prefix = config.save_prefix
    longest = max(len(prompt.name.encode()) for prompt in prompts) if not config.prompt_as_path else 0
    if any(mark in prefix for mark in "/\\\0") or prefix.startswith("."):
        raise UserError(f"save_prefix = {prefix!r}: is not a plain beginning of a file name; choose letters and digits")
    if prefix and len(prefix.encode()) + longest > MAX_NAME_BYTES:
        raise UserError(f"save_prefix = {prefix!r}: makes names of more than {MAX_NAME_BYTES} bytes; shorten it")


def prompt_faults(prompts: Sequence[Prompt], config: GenerateConfig) -> list[str]:
    """Return the errors in the references and options of all prompts, each once. Raises `UserError` where frames are to
    be known and no prompt has a reference."""
    if not config.knows_nothing and not config.use_t2i2v and not any(prompt.refs for prompt in prompts):
        raise UserError(
            f'cond_type = "{config.kind}": no prompt has a reference; write --ref FILE, or give --prompts a .csv with '
            "a column ref"
        )
    first: dict[str, int] = {}
    for prompt in {replace(prompt, text="", name="", negative=None): prompt for prompt in reversed(prompts)}.values():
        try:
            found = list(clip_faults(prompt, own_config(prompt, config)))
        except UserError as error:
            if not prompt.options:
                raise
            found = [(prompt.row, str(error))]
        for row, fault in found:
            first[fault] = min(row, first.get(fault, row))
    for row, fault in _segment_faults(prompts, config):
        first.setdefault(fault, row)
    in_order = sorted(first.items(), key=lambda item: item[1])
    return [f"{fault} in row {row + 1}" if config.prompts else fault for fault, row in in_order]


def _segment_faults(prompts: Sequence[Prompt], config: GenerateConfig) -> Iterator[tuple[int, str]]:
    """Prompts that have another number of texts than their video has segments: row and clause of each."""
    segments, frames = config.sample_rules.segments, config.sampling_option.num_frames
    for clip in chain.from_iterable(prompt.clips for prompt in prompts if segments is not None):
        for text in (clip.text, clip.negative or config.negative_prompt):
            try:
                in_segments(text, segments(frames))
            except UserError as error:
                yield clip.row, str(error).rpartition(";")[0]


def clip_faults(prompt: Prompt, config: GenerateConfig) -> Iterator[tuple[int, str]]:
    """Yield the row and the message of each error in what the clips of a prompt know beforehand."""
    law, every, strength, refs = config.law_of_family, whole_clip(config), strength_of(prompt, config), prompt.refs
    kind = kind_of(prompt, config)
    if prompt.kind is not None:
        fault = "use_t2i2v makes the first frame" if config.use_t2i2v else _kind_fault(kind, config)
        if fault:
            yield prompt.row, f'cond_type = "{kind}": {fault}'
            return
        config = config.model_copy(update={"cond_type": kind})
    asked = law is not None and (refs or prompt.kind is not None)
    windows = windows_taken(prompt, refs_taken(prompt, refs, config) if refs else ONE_REF, config) if asked else ()
    faults = reference_faults(refs, (*windows, *([every] if refs and strength < 1 else ())), config)
    if len(refs) > 1 and kind in config.kinds and kind != config.family.kind_of_nothing and not windows:
        faults.append(f'cond_type = "{kind}": {len(refs)} references leave no frame of {len(every.pixels)} to be made')
    if path := prompt.mask or config.mask:
        takes = any(window.masked and window.shown is None for window in windows)
        other = next((f' (cond_type = "{one}" does)' for one in config.kinds if law and one in law.needs_mask), "")
        none = [f'mask {path!r}: cond_type = "{kind}" takes none{other}']
        faults += reference_faults([path], [replace(every, masked=True)], config, "mask") if takes else none
    elif law and refs and kind in law.needs_mask:
        faults.append(f'cond_type = "{kind}": there is no mask (--mask FILE, white where the ref is made anew)')
    if strength < 1 and not refs:
        faults.append(f"strength = {strength:g}: there is no ref to begin from")
    yield from ((prompt.row, fault) for fault in faults)
    for clip in prompt.clips:
        yield from ((clip.row, fault) for fault in _companion_faults(clip, config))
        if (ratio := ratio_of(clip, config)) and "input" not in config.family.readers(config.model):
            yield clip.row, f"edit_ratio = {ratio:g}: this model keeps what is known to the end"
        if clip.carries is not None:
            if fault := _carries_fault(clip.carries, config):
                yield clip.row, f'carries = "{clip.carries}": {fault}'
                continue
            windows = windows_taken(clip, refs_taken(clip, refs, config), config)
            faults = reference_faults(refs, [window for window in windows if window.reference is not None], config)
            yield from ((clip.row, fault) for fault in faults)
        if law and (clip.carries or refs) and (clip.carries or kind) not in config.kinds:
            yield from _gives_all(clip, refs, config)


def _gives_all(clip: Prompt, files: Sequence[str], config: GenerateConfig) -> Iterator[tuple[int, str]]:
    """Row and clause where the known frames of a clip, written out, are all there are."""
    kind, every = clip.carries or kind_of(clip, config), whole_clip(config)
    refs = refs_taken(clip, files, config)
    places = config.law_of_family.given(kind, config.ae.latent, shape_of(config), None, refs)
    if not edited(places, ratio_of(clip, config), len(every.frames)).released.any():
        key = "carries" if clip.carries else "cond_type"
        yield clip.row, f'{key} = "{kind}": gives all {len(every.frames)} latent frames, and none is left to be made'


def _cut_references(prompts: Sequence[Prompt], config: GenerateConfig) -> Iterator[str]:
    """Yield a line for each reference that has fewer frames than a clip asks for, which takes those."""
    for prompt in prompts if config.law_of_family is not None else ():
        for clip in prompt.clips if prompt.refs else ():
            refs = refs_taken(clip, prompt.refs, config)
            endless = replace(refs, frames=(math.inf,) * len(refs.frames))
            asked, taken = (windows_taken(clip, one, config) for one in (endless, refs))
            for window, part in zip(asked, taken, strict=True):
                if len(part.frames) < len(window.frames):
                    number = part.reference or 0
                    has = f"has {refs.frames[number]} frames at {config.fps_save:g} FPS"
                    given = f"gives {len(part.frames)} latent frames, not {len(window.frames)}"
                    yield f"ref {prompt.refs[number]!r}: {has}, so it {given}"


def _companion_faults(clip: Prompt, config: GenerateConfig) -> Iterator[str]:
    """Yield the errors in a clip's auxiliary input files; videos are only probed."""
    for one, files in companions_of(clip, config):
        if len(files) > one.most:
            yield f"{one.name} = {';'.join(files)!r}: {len(files)} files; the model takes {one.most}"
        for file in files:
            try:
                if one.kind == "video":
                    frame_numbers(file, Window(range(1), range(shape_of(config)[0])), config, f"{one.name} of a video")
                else:
                    brought_file(one, file, config)
            except ClipError as error:
                yield f"{one.name} {file!r}: {error}"


def _carries_fault(kind: str, config: GenerateConfig) -> str | None:
    """Why a clip cannot take the known frames of a kind from the one before."""
    still = config.sampling_option.num_frames == 1 and config.family.has_kind(kind, config.model)
    return "a still has no further clips" if still else _kind_fault(kind, config, carried=True)


def _kind_fault(kind: str, config: GenerateConfig, carried: bool = False) -> str | None:
    """Why nothing can be known by a kind; carried: from the clip before."""
    family = config.family
    if not family.has_kind(kind, config.model):
        return f"choose one of {', '.join(config.kinds) or 'no kinds'}"
    if kind == family.kind_of_nothing or config.model.refuses_known:
        return None if kind == family.kind_of_nothing else config.model.refuses_known
    if carried and kind in config.law_of_family.needs_mask:
        return "wants a mask, which a clip that carries on has not"
    if carried:
        taken = config.law_of_family.windows(kind, config.ae.latent, config.sampling_option.num_frames)
        return None if taken else f"leaves no frame of {config.sampling_option.num_frames} to be made"
    return config.fault_of_kind(kind)


def _check_weights(config: GenerateConfig, prompts: Sequence[Prompt]) -> list[str]:
    """Compare the names and shapes in a file's header with the model's; return warnings."""
    if config.low_noise is not None and config.low_noise.from_pretrained is not None:
        with open_pretrained(config.of_low_noise().model, key=LOW_NOISE_KEY):
            pass  # opening compares
    if config.model.from_pretrained is None:
        return []
    asked = [("cond_type", config.kind), *(("cond_type", kind_of(prompt, config)) for prompt in prompts)]
    asked += [("carries", clip.carries) for prompt in prompts for clip in prompt.then]
    known = next(((key, kind) for key, kind in asked if kind != config.family.kind_of_nothing), None)
    with open_pretrained(config.model) as (weights, _):
        if known is None or weights.unread_known is None:
            return []
    key, kind = known
    return [
        f"model.from_pretrained = {config.model.from_pretrained!r}: has {weights.unread_known}, so for {key} = "
        f'"{kind}" the model was never trained on conditioning frames; they are copied into the videos, and the '
        "other frames do not depend on them"
    ]
