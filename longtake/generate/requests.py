"""What a generation is asked for: its videos, their names, seeds and references; checked before a model is built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from longtake.buckets import frame_size
from longtake.contracts import UserError
from longtake.diffusion import known_windows
from longtake.encoders import check_shape
from longtake.generate.config import GenerateConfig
from longtake.generate.prompts import MAX_NAME_BYTES, TABLE_FIX, Prompt, in_one_sentence, read_prompts
from longtake.generate.references import reference_faults
from longtake.system import find_encoders
from longtake.system.pretrained import open_pretrained

STILLS_FOLDER = "generated_condition"


@dataclass(frozen=True)
class Video:
    """One video, to be made or made, and where it is written; the prompt lies in a `.txt` beside it."""

    prompt: Prompt
    seed: int
    path: Path
    refs: tuple[str, ...] = ()  # files whose frames it is given


def prompts_of(config: GenerateConfig, faults: list[str] | None = None) -> list[Prompt]:
    """The prompts of a generation; `faults` as for `read_prompts`, which says what is raised."""
    return read_prompts(
        config.prompt,
        config.prompts,
        config.num_samples,
        ref=config.ref,
        start=config.start_index,
        end=config.end_index,
        faults=faults,
    )


def check_request(config: GenerateConfig) -> list[str]:
    """Raises `UserError`, before a model is built, for what cannot be made, and for files that are not there.

    Read are the prompts, the references (all faults at once), the names and shapes in the weights' headers. Returns
    what can be made and is hardly what was meant, one line each.
    """
    faults: list[str] = []
    prompts = prompts_of(config, faults)
    _check_names(prompts, config)
    stills = (config.of_stills(),) if config.use_t2i2v else ()
    for part in (config, *stills):
        option = part.sampling_option
        height, width = frame_size(option.resolution, option.aspect_ratio, part.size_divisor)
        check_shape(part.ae, option.num_frames, height, width)
    faults += _reference_faults(prompts, config)
    if faults:
        place = "" if config.prompts is None else f"prompts = {config.prompts!r}"
        raise in_one_sentence(place, faults, "name other files" if config.prompts is None else TABLE_FIX)
    doubts = [line for part in (config, *stills) for line in _check_weights(part)]
    for part in (config, *stills):  # last, for what the hub has is fetched here
        find_encoders(part)
    return doubts


def plan_videos(config: GenerateConfig) -> list[Video]:
    """Every video to make, with names that are free. Video k of prompt i has the seed `first + i * num_sample + k`.

    i counts all prompts, also those that `start_index` leaves out. So each video has a seed of its own, which depends
    neither on batches and ranks nor on how a table is shared out.
    """
    option, folder, each = config.sampling_option, kind_folder(config), config.num_sample
    first = option.seed if option.seed is not None else config.seed
    folder.mkdir(parents=True, exist_ok=True)
    suffix = ".png" if option.num_frames == 1 else ".mp4"
    taken: set[Path] = set()
    videos = []
    for prompt in prompts_of(config):
        for k in range(each):
            path = free_path(folder, _file_name(prompt, k, config), suffix, taken)
            taken.add(path)
            videos.append(Video(prompt, first + prompt.row * each + k, path, used_refs(prompt, config)))
    return videos


def used_refs(prompt: Prompt, config: GenerateConfig) -> tuple[str, ...]:
    """The reference files of a prompt that the generation looks at."""
    return () if config.kind == "t2v" else prompt.refs


def kind_folder(config: GenerateConfig) -> Path:
    """The folder that the videos, or stills, of a generation go into."""
    kind = "image" if config.sampling_option.num_frames == 1 else "video"
    return Path(config.save_dir) / f"{kind}_{config.sampling_option.resolution}"


def free_path(folder: Path, name: str, suffix: str, taken: set[Path] | frozenset[Path] = frozenset()) -> Path:
    """`folder/name.suffix`, or with the first number that makes it free, its `.txt` too."""
    number = 1
    while True:
        path = folder / (f"{name}{suffix}" if number == 1 else f"{name}-{number}{suffix}")
        if path not in taken and not path.exists() and not path.with_suffix(".txt").exists():
            return path
        number += 1


def claim_path(path: Path) -> Path:
    """Makes an empty `.txt` beside `path`, so that no other generation takes this name from then on.

    Returns the path to write to: with a number where another one took the name since it was planned. Raises OSError.
    """
    while True:
        claimed = free_path(path.parent, path.stem, path.suffix)
        try:
            claimed.with_suffix(".txt").touch(exist_ok=False)
        except FileExistsError:  # in this very moment
            continue
        return claimed


def _file_name(prompt: Prompt, k: int, config: GenerateConfig) -> str:
    """The name of video k of a prompt, without suffix."""
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
        raise UserError(f"save_prefix = {prefix!r}: is no plain beginning of a file name; choose letters and digits")
    if prefix and len(prefix.encode()) + longest > MAX_NAME_BYTES:
        raise UserError(f"save_prefix = {prefix!r}: makes names of more than {MAX_NAME_BYTES} bytes; shorten it")


def _reference_faults(prompts: Sequence[Prompt], config: GenerateConfig) -> list[str]:
    """What is wrong with the references of all prompts, each file named once. Raises `UserError` where none has one."""
    if config.kind == "t2v":
        return []
    if not config.use_t2i2v and not any(prompt.refs for prompt in prompts):
        raise UserError(
            f'cond_type = "{config.kind}": no prompt has a reference; write --ref FILE, or give --prompts a .csv with '
            "a column ref"
        )
    windows = known_windows(config.kind, config.ae.latent, config.sampling_option.num_frames)
    first = {prompt.refs: prompt.row + 1 for prompt in reversed(prompts) if prompt.refs}
    return [
        f"{fault} in row {row}" if config.prompts else fault
        for refs, row in sorted(first.items(), key=lambda item: item[1])
        for fault in reference_faults(refs, windows, config)
    ]


def _check_weights(config: GenerateConfig) -> list[str]:
    """Compares the names and shapes in a file's header with the model's; returns what is to be said of them."""
    if config.model.from_pretrained is None:
        return []
    with open_pretrained(config.model) as (weights, _):
        if config.kind == "t2v" or not weights.grown:
            return []
    return [
        f'model.from_pretrained = {config.model.from_pretrained!r}: has no cond_in, so for cond_type = "{config.kind}" '
        "the model never saw known frames; they are put into the videos, and the other frames know nothing of them"
    ]
