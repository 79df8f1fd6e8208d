"""The videos a generation makes: names, seeds and reference files, checked before a model is built."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from longtake.contracts import UserError
from longtake.data import ClipError, read_frames, read_image, resize_crop, to_unit
from longtake.data.clips.captions import read_frame_numbers
from longtake.data.clips.video import is_image
from longtake.data.rules import MASK, Companion
from longtake.diffusion import NOTHING_KNOWN, ONE_REF, Refs, Window
from longtake.generate.config import GenerateConfig
from longtake.generate.options import own_config, seed_of, suffix_of
from longtake.generate.prompts import MAX_NAME_BYTES, TABLE_FIX, Prompt, in_one_sentence, read_prompts, split_paths
from longtake.generate.references import frame_numbers, frames_of, known_pixels, reference_faults
from longtake.generate.sample import Request, edited, in_segments, shape_asked
from longtake.system import find_encoders
from longtake.system.pretrained import open_pretrained

STILLS_FOLDER = "generated_condition"


@dataclass(frozen=True)
class Video:
    """One video, planned or made, and its path; the prompt is written to a `.txt` beside it."""

    prompt: Prompt
    seed: int
    path: Path
    refs: tuple[str, ...] = ()  # files of its conditioning frames


def prompts_of(config: GenerateConfig, faults: list[str] | None = None) -> list[Prompt]:
    place = {"ref": config.ref, "start": config.start_index, "end": config.end_index}
    place |= {"faults": faults, "companions": config.companion_names}
    if config.family.segments is not None:
        place["scene_marks"] = config.family.scene_marks or ("", "")
    prompts = read_prompts(config.prompt, config.prompts, config.num_samples, **place)
    return [_continued(prompt, config) for prompt in prompts]


def _continued(prompt: Prompt, config: GenerateConfig) -> Prompt:
    """A prompt as its family reads it; one of one clip with `num_clips` of them, each from the one before."""
    said = config.family.spoken(prompt.text, 1 if prompt.then else config.num_clips)
    prompt = replace(prompt, text=said.texts[0])
    if said.refs is not None or said.kind is not None:
        prompt = replace(prompt, refs=split_paths(said.refs) or prompt.refs, kind=said.kind or prompt.kind)
    if prompt.then or config.num_clips == 1:
        return prompt
    law, kind, carries = config.law_of_family, kind_of(prompt, config), config.carries
    own = {"refs": (), "mask": None, "kind": None, "strength": None}
    later = [
        replace(prompt, text=text, repeat=clip, carries=law.continued(kind, carries, clip) if law else carries, **own)
        for clip, text in enumerate(said.texts[1:], 1)
    ]
    return replace(prompt, then=tuple(later))


def check_request(config: GenerateConfig) -> list[str]:
    """Raises `UserError`, before a model is built, for impossible requests and missing files, all faults at once, by
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
    doubts += _check_weights(config, prompts) + [line for part in stills for line in _check_weights(part, ())]
    for part in (config, *stills):  # last, since this downloads from the hub
        find_encoders(part)
    return doubts


def plan_videos(config: GenerateConfig) -> list[Video]:
    """Every video to make, under unused names. Video k of prompt i, counting all prompts, has the seed `first + i *
    num_sample + k`, whatever the batches, the ranks, and the ranges of a table that are generated apart."""
    option, folder, each = config.sampling_option, kind_folder(config), config.num_sample
    first = option.seed if option.seed is not None else config.seed
    chosen = [(prompt, k) for prompt in prompts_of(config) for k in range(each)]
    paths = unused_paths(folder, [_file_name(p, k, config) + suffix_of(p, config) for p, k in chosen])
    return [
        Video(prompt, seed_of(prompt, first + prompt.row * each) + k, path, refs_of(prompt, config))
        for (prompt, k), path in zip(chosen, paths, strict=True)
    ]


def clips_of(video: Video, config: GenerateConfig) -> list[Request]:
    """What is asked for each clip of a video. Raises `UserError` for a file that cannot be read."""
    law, shape, every = config.law_of_family, shape_of(config), whole_clip(config)
    found = []
    for number, clip in enumerate(video.prompt.clips):
        places, known, start = NOTHING_KNOWN, (), strength_of(clip, config)
        if law is not None and (clip.carries or video.refs):
            mask = None
            if not number and (path := clip.mask or config.mask):
                (pixels,) = known_pixels([path], [replace(every, masked=True)], shape[1:], config)
                mask = (to_unit(pixels).mean(0, keepdim=True) > 0).float()
            kind, refs = clip.carries or kind_of(clip, config), refs_taken(clip, video.refs, config)
            places = law.given(kind, config.ae.latent, shape, mask, refs)
        if ratio := ratio_of(clip, config):
            places = edited(places, ratio, len(every.frames))
        if not number:
            known = known_pixels(video.refs, places.windows, shape[1:], config)
        elif any(window.reference is not None for window in places.windows):
            own = (() if window.reference is None else (window,) for window in places.windows)
            known = tuple(next(iter(known_pixels(video.refs, one, shape[1:], config)), None) for one in own)
        before = known_pixels(video.refs, [every], shape[1:], config)[0] if start < 1 and not number else None
        seed = video.seed + (clip.row - video.prompt.row) * config.num_sample + (clip.repeat << 32)
        negative = clip.negative or config.negative_prompt
        found.append(Request(clip.text, seed, negative, places, known, start, before, brought_by(clip, config)))
    return found


def refs_taken(clip: Prompt, files: Sequence[str], config: GenerateConfig) -> Refs:
    """What a clip of a video with these references can take of them."""
    return Refs(tuple(frames_of(path, config) for path in files), carried=clip.carries is not None)


def windows_taken(clip: Prompt, refs: Refs, config: GenerateConfig) -> tuple[Window, ...]:
    kind = clip.carries or kind_of(clip, config)
    return config.law_of_family.windows(kind, config.ae.latent, config.sampling_option.num_frames, refs)


def companions_of(clip: Prompt, config: GenerateConfig) -> list[tuple[Companion, tuple[str, ...]]]:
    """What a clip brings along, and the files it is in."""
    files = config.companions | dict(clip.brings)
    return [(one, split_paths(files[one.name])) for one in config.sample_rules.companions if files.get(one.name)]


def brought_by(clip: Prompt, config: GenerateConfig) -> dict[str, Tensor]:
    """What a clip brings along, as `Request.companions`. Raises `UserError` for a file that cannot be used."""
    found: dict[str, Tensor] = {}
    for one, files in companions_of(clip, config):
        for name, shape in one.shapes(shape_of(config)).items():
            found[name] = torch.zeros(shape, dtype=torch.bool if name.endswith(MASK) else torch.float32)
        for place, file in enumerate(files[: one.most]):
            try:
                part = _brought_file(one, file, config)
            except ClipError as error:
                raise UserError(f"{one.name} {file!r}: {error}; give another file") from error
            if one.kind == "stills":
                found[one.name][place], found[one.name + MASK][place] = part, True
            else:
                found[one.name] = part
    return found


def _brought_file(one: Companion, path: str, config: GenerateConfig) -> Tensor:
    """A file of a companion: pixels in [-1, 1], or numbers."""
    frames, *size = shape_of(config)
    if one.kind == "numbers":
        return torch.from_numpy(read_frame_numbers(path, np.arange(frames), one.width, one.header))
    window = Window(range(1), range(1 if one.kind == "stills" else frames))
    numbers, still = frame_numbers(path, window, config, f"{one.name} of a video"), is_image(path)
    pixels = read_image(path)[numbers] if still else read_frames(path, numbers)
    return to_unit(resize_crop(pixels, (size[0], size[1]), config.sample_rules.pixels, still))


def shape_of(config: GenerateConfig) -> tuple[int, int, int]:
    """(T, H, W) of a clip."""
    return shape_asked(config, config.sampling_option)


def whole_clip(config: GenerateConfig) -> Window:
    shape = shape_of(config)
    return Window(range(config.ae.latent(*shape)[1]), range(shape[0]))


def strength_of(clip: Prompt, config: GenerateConfig) -> float:
    """The share of noise that a clip begins from; of a later one only its row says it."""
    return clip.strength if clip.strength is not None else 1.0 if clip.carries else config.strength


def ratio_of(clip: Prompt, config: GenerateConfig) -> float:
    return config.edit_ratio if clip.edit_ratio is None else clip.edit_ratio


def refs_of(prompt: Prompt, config: GenerateConfig) -> tuple[str, ...]:
    """The references of a prompt that are used."""
    unused = kind_of(prompt, config) == config.family.kind_of_nothing and strength_of(prompt, config) == 1
    return () if unused else prompt.refs


def kind_of(prompt: Prompt, config: GenerateConfig) -> str:
    """Which frames are known of a prompt's first clip."""
    return config.kind if prompt.kind is None else prompt.kind


def unused_paths(folder: Path, names: Sequence[str]) -> list[Path]:
    """A path in the folder, which is made, for each file name, or with the first number that is free; all differ."""
    taken: dict[Path, None] = {}
    for name in names:
        stem, _, suffix = name.rpartition(".")
        taken[path := free_path(folder, stem, f".{suffix}", taken)] = None
        path.parent.mkdir(parents=True, exist_ok=True)
    return list(taken)


def kind_folder(config: GenerateConfig) -> Path:
    """The output folder of a generation's videos or stills."""
    kind = "image" if config.sampling_option.num_frames == 1 else "video"
    return Path(config.save_dir) / ("" if config.prompt_folders else f"{kind}_{config.sampling_option.resolution}")


def free_path(folder: Path, name: str, suffix: str, taken: Collection[Path] = ()) -> Path:
    """`folder/name.suffix`, or with the first number for which neither it nor its `.txt` exists."""
    names = chain([name], (f"{name}-{number}" for number in count(2)))
    paths = (folder / f"{name}{suffix}" for name in names)
    return next(p for p in paths if p not in taken and not p.exists() and not p.with_suffix(".txt").exists())


def claim_path(path: Path) -> Path:
    """The path to write to, numbered where another generation has taken the name; an empty `.txt` beside it reserves
    it. Raises OSError."""
    while True:
        claimed = free_path(path.parent, path.stem, path.suffix)
        try:
            claimed.with_suffix(".txt").touch(exist_ok=False)
        except FileExistsError:  # a race with another generation
            continue
        return claimed


def _file_name(prompt: Prompt, k: int, config: GenerateConfig) -> str:
    if config.prompt_folders:
        return f"prompt-{prompt.row}/{config.save_prefix}{k:06d}"
    if config.prompt_as_path:
        plain = "".join("_" if mark in "/\\\0\r\n" else mark for mark in prompt.text)
        plain = f"_{plain[1:]}" if plain.startswith(".") else plain
        room = MAX_NAME_BYTES - len(config.save_prefix.encode()) - len(f"-{k}")
        return f"{config.save_prefix}{plain.encode()[:room].decode(errors='ignore')}-{k}"
    return f"{config.save_prefix}{prompt.name}" + (f"_{k}" if config.num_sample > 1 else "")


def _check_names(prompts: Sequence[Prompt], config: GenerateConfig) -> None:
    prefix = config.save_prefix
    longest = max(len(prompt.name.encode()) for prompt in prompts) if not config.prompt_as_path else 0
    if any(mark in prefix for mark in "/\\\0") or prefix.startswith("."):
        raise UserError(f"save_prefix = {prefix!r}: is not a plain beginning of a file name; choose letters and digits")
    if prefix and len(prefix.encode()) + longest > MAX_NAME_BYTES:
        raise UserError(f"save_prefix = {prefix!r}: makes names of more than {MAX_NAME_BYTES} bytes; shorten it")


def prompt_faults(prompts: Sequence[Prompt], config: GenerateConfig) -> list[str]:
    """What is wrong with the references of all prompts, each file named once. Raises `UserError` where none has one."""
    if not config.knows_nothing and not config.use_t2i2v and not any(prompt.refs for prompt in prompts):
        raise UserError(
            f'cond_type = "{config.kind}": no prompt has a reference; write --ref FILE, or give --prompts a .csv with '
            "a column ref"
        )
    first: dict[str, int] = {}
    for prompt in {replace(prompt, text="", name="", negative=None): prompt for prompt in reversed(prompts)}.values():
        for row, fault in _clip_faults(prompt, own_config(prompt, config)):
            first[fault] = min(row, first.get(fault, row))
    for row, fault in _segment_faults(prompts, config):
        first.setdefault(fault, row)
    found = sorted(first.items(), key=lambda item: item[1])
    return [f"{fault} in row {row + 1}" if config.prompts else fault for fault, row in found]


def _segment_faults(prompts: Sequence[Prompt], config: GenerateConfig) -> Iterator[tuple[int, str]]:
    """Prompts that have another number of texts than their video has segments: row and clause of each."""
    segments, frames = config.sample_rules.segments, config.sampling_option.num_frames
    for clip in chain.from_iterable(prompt.clips for prompt in prompts if segments is not None):
        for text in (clip.text, clip.negative or config.negative_prompt):
            try:
                in_segments(text, segments(frames))
            except UserError as error:
                yield clip.row, str(error).rpartition(";")[0]


def _clip_faults(prompt: Prompt, config: GenerateConfig) -> Iterator[tuple[int, str]]:
    """What is wrong with what the clips of a prompt know beforehand: row and clause of each."""
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
        if (ratio := ratio_of(clip, config)) and "input" not in config.family.readers:
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
    """A line for each reference that has fewer frames than a clip asks for, which takes those."""
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
    """What is wrong with the files that a clip brings along; videos are only probed."""
    for one, files in companions_of(clip, config):
        if len(files) > one.most:
            yield f"{one.name} = {';'.join(files)!r}: {len(files)} files; the model takes {one.most}"
        for file in files:
            try:
                if one.kind == "video":
                    frame_numbers(file, Window(range(1), range(shape_of(config)[0])), config, f"{one.name} of a video")
                else:
                    _brought_file(one, file, config)
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
    """Compares the names and shapes in a file's header with the model's; returns warnings."""
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
