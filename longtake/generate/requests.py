"""The videos a generation makes: names, seeds, and what is asked for each of their clips."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from longtake.contracts import UserError
from longtake.data.clips.animation import is_still
from longtake.data.clips.captions import read_frame_numbers
from longtake.data.clips.transforms import resize_crop, to_unit
from longtake.data.clips.video import ClipError, read_frames, read_image
from longtake.data.rules import MASK, Companion
from longtake.diffusion.known import NOTHING_KNOWN, Refs, Window
from longtake.generate.config import GenerateConfig
from longtake.generate.options import seed_of, suffix_of
from longtake.generate.prompts import MAX_NAME_BYTES, Prompt, read_prompts, split_paths
from longtake.generate.references import frame_numbers, frames_of, known_pixels
from longtake.generate.sample import Request, edited, shape_asked

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
    """Return a prompt as its family reads it; one of one clip with `num_clips` of them, each from the one before."""
    said = config.family.spoken(prompt.text, 1 if prompt.then else config.num_clips)
    prompt = replace(prompt, text=said.texts[0])
    if said.refs is not None:  # an empty one takes the default away
        prompt = replace(prompt, refs=split_paths(said.refs))
    if said.kind is not None:
        prompt = replace(prompt, kind=said.kind or config.family.kind_of_nothing)
    if prompt.then or config.num_clips == 1:
        return prompt
    law, kind, carries = config.law_of_family, kind_of(prompt, config), config.carries
    own = {"refs": (), "mask": None, "kind": None, "strength": None}
    later = [
        replace(prompt, text=text, repeat=clip, carries=law.continued(kind, carries, clip) if law else carries, **own)
        for clip, text in enumerate(said.texts[1:], 1)
    ]
    return replace(prompt, then=tuple(later))


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
    """Return the request of each clip of a video. Raises `UserError` for a file that cannot be read."""
    law, shape, every = config.law_of_family, shape_of(config), whole_clip(config)
    found = []
    for number, clip in enumerate(video.prompt.clips):
        places, known, start = NOTHING_KNOWN, (), strength_of(clip, config)
        if law is not None and (clip.carries or video.refs):
            mask = None
            if not number and (path := clip.mask or config.mask):
                (pixels,) = known_pixels([path], [replace(every, masked=True)], shape[1:], config)
                mask = to_unit(pixels).mean(0, keepdim=True) > 0
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
    """Return the references that a clip can take: the number of frames of each file, and whether it carries frames over
    from the clip before."""
    return Refs(tuple(frames_of(path, config) for path in files), carried=clip.carries is not None)


def windows_taken(clip: Prompt, refs: Refs, config: GenerateConfig) -> tuple[Window, ...]:
    kind = clip.carries or kind_of(clip, config)
    return config.law_of_family.windows(kind, config.ae.latent, config.sampling_option.num_frames, refs)


def companions_of(clip: Prompt, config: GenerateConfig) -> list[tuple[Companion, tuple[str, ...]]]:
    """Return the auxiliary inputs of a clip, each with its files."""
    files = config.companions | dict(clip.brings)
    return [(one, split_paths(files[one.name])) for one in config.sample_rules.companions if files.get(one.name)]


def brought_by(clip: Prompt, config: GenerateConfig) -> dict[str, Tensor]:
    """Load a clip's auxiliary inputs, as `Request.companions`. Raises `UserError` for a file that cannot be used."""
    found: dict[str, Tensor] = {}
    for one, files in companions_of(clip, config):
        for name, shape in one.shapes(shape_of(config)).items():
            found[name] = torch.zeros(shape, dtype=torch.bool if name.endswith(MASK) else torch.float32)
        for place, file in enumerate(files[: one.most]):
            try:
                part = brought_file(one, file, config)
            except ClipError as error:
                raise UserError(f"{one.name} {file!r}: {error}; give another file") from error
            if one.kind == "stills":
                found[one.name][place], found[one.name + MASK][place] = part, True
            else:
                found[one.name] = part
    return found


def brought_file(one: Companion, path: str, config: GenerateConfig) -> Tensor:
    """Return a file of a companion: pixels in [-1, 1], or numbers."""
    frames, *size = shape_of(config)
    if one.kind == "numbers":
        return torch.from_numpy(read_frame_numbers(path, np.arange(frames), one.width, one.header))
    window = Window(range(1), range(1 if one.kind == "stills" else frames))
    numbers, still = frame_numbers(path, window, config, f"{one.name} of a video"), is_still(path)
    pixels = read_image(path)[numbers] if still else read_frames(path, numbers)
    return to_unit(resize_crop(pixels, (size[0], size[1]), config.sample_rules.pixels, still))


def shape_of(config: GenerateConfig) -> tuple[int, int, int]:
    """(T, H, W) of a clip."""
    return shape_asked(config, config.sampling_option)


def whole_clip(config: GenerateConfig) -> Window:
    shape = shape_of(config)
    return Window(range(config.ae.latent(*shape)[1]), range(shape[0]))


def strength_of(clip: Prompt, config: GenerateConfig) -> float:
    """Return the share of noise that a clip begins from; of a later one only its row says it."""
    return clip.strength if clip.strength is not None else 1.0 if clip.carries else config.strength


def ratio_of(clip: Prompt, config: GenerateConfig) -> float:
    return config.edit_ratio if clip.edit_ratio is None else clip.edit_ratio


def refs_of(prompt: Prompt, config: GenerateConfig) -> tuple[str, ...]:
    """Return the references of a prompt that are used."""
    unused = kind_of(prompt, config) == config.family.kind_of_nothing and strength_of(prompt, config) == 1
    return () if unused else prompt.refs


def kind_of(prompt: Prompt, config: GenerateConfig) -> str:
    """Return the conditioning kind of a prompt's first clip."""
    return config.kind if prompt.kind is None else prompt.kind


def unused_paths(folder: Path, names: Sequence[str]) -> list[Path]:
    """Return a path in the folder, which is made, for each file name, or with the first number that is free; all
    differ."""
    taken: dict[Path, None] = {}
    for name in names:
        stem, _, suffix = name.rpartition(".")
        taken[path := free_path(folder, stem, f".{suffix}", taken)] = None
        path.parent.mkdir(parents=True, exist_ok=True)
    return list(taken)


def kind_folder(config: GenerateConfig) -> Path:
    """Return the output folder of a generation's videos or stills."""
    kind = "image" if config.sampling_option.num_frames == 1 else "video"
    return Path(config.save_dir) / ("" if config.prompt_folders else f"{kind}_{config.sampling_option.resolution}")


def free_path(folder: Path, name: str, suffix: str, taken: Collection[Path] = ()) -> Path:
    """`folder/name.suffix`, or with the first number for which neither it nor its `.txt` exists."""
    names = chain([name], (f"{name}-{number}" for number in count(2)))
    paths = (folder / f"{name}{suffix}" for name in names)
    return next(p for p in paths if p not in taken and not p.exists() and not p.with_suffix(".txt").exists())


def claim_path(path: Path) -> Path:
    """Return the path to write to, numbered where another generation has taken the name; an empty `.txt` beside it
    reserves it. Raises OSError."""
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
