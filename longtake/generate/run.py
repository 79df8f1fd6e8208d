"""A generation from its config: prompts are spread over the ranks, videos written to files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from longtake import durable
from longtake.contracts import UserError
from longtake.data.clips.captions import captions_in
from longtake.data.clips.transforms import from_unit
from longtake.data.clips.video import read_frames, read_image, video_writer, write_image
from longtake.durable import naming
from longtake.generate.config import GenerateConfig
from longtake.generate.options import adapter_strength, own_config
from longtake.generate.requests import (
    STILLS_FOLDER,
    Video,
    claim_path,
    clips_of,
    free_path,
    kind_folder,
    plan_videos,
    unused_paths,
)
from longtake.generate.rounds import alike, batches_of, degrees_of, rounds, share_out
from longtake.generate.sample import final_prompt, pixel_shape, sample_chains, stream_videos
from longtake.generate.sheet import contact_sheet
from longtake.generate.source import GenerationSource, check_loaded, load_weights, trains_low_noise
from longtake.parallel.config import ParallelConfig
from longtake.parallel.mesh import Mesh, TokenPeers
from longtake.parallel.world import World
from longtake.system.build import System, build_system, compiles, with_low_noise
from longtake.system.caption_lengths import lost_words
from longtake.system.encoders import CaptionEncoders, encoders_on_host

Say = Callable[[str], None]
# progress(videos done, total): the first is fractional in the middle of a batch
OnProgress = Callable[[float, int], None]
# take(paths of a batch's files, its pixels float32 [B, 3, T, H, W] in [-1, 1]), on the rank that wrote them
TakeFrames = Callable[[Sequence[Path], Tensor], None]


class NotFiniteVideo(UserError):
    """A model made NaN or infinity, which a file would show as black."""


def open_system(
    source: GenerationSource,
    world: World,
    say: Say = print,
    kept: CaptionEncoders | None = None,
    parallel: ParallelConfig | None = None,
) -> System:
    """Build the model of a generation and load its weights; with `offload_model` its parts stay in host memory until
    they are needed. `kept`: text encoders of an earlier system, reused where they are the same; `parallel`: degrees in
    place of the config's. Collective."""
    config = encoders_on_host(source.config) if source.config.offload_model else source.config
    if config.dtype == "fp32":  # the presets' bf16 masters would round the weights all the same
        config = config.model_copy(update={"master_dtype": "fp32"})
    if config.compile == "auto":  # a video is made in less time than it takes
        config = config.model_copy(update={"compile": False})
    restored = source.checkpoint is not None
    compiled, why = compiles(config, world)
    if why is not None:  # a run may have been trained elsewhere
        say(why)
    config = config.model_copy(update={"compile": compiled})
    config = config.model_copy(update={"model": config.model.without_recomputation()})
    system = build_system(config, Mesh.create(parallel or config.parallel, world), world, restored=restored, kept=kept)
    _load(system, source, world, say)
    if config.low_noise is None:
        return system.offloaded() if config.offload_model else system
    own = restored and trains_low_noise(source.checkpoint)
    system = with_low_noise(system.offloaded(), world, restored=own, trained=own)
    _load(system.low_noise, source if own else replace(source, checkpoint=None), world, say)
    return system.offloaded()


def _load(system: System, source: GenerationSource, world: World, say: Say) -> None:
    """Fill a denoiser from the checkpoint, where there is one, and say where its weights are from. Collective."""
    if source.checkpoint is not None:
        part = load_weights(system, source.checkpoint, source.config.ema)
        world.on_all(lambda: check_loaded(system.denoiser, source.checkpoint))
        say(f"weights: {'averaged (ema)' if part.endswith('ema') else 'as trained'}, from {source.checkpoint}")
    else:
        for line in system.notes:
            say(line)
    system.keep_compute_dtype()


def generate_from(
    source: GenerationSource,
    world: World,
    say: Say = print,
    progress: OnProgress | None = None,
    take: TakeFrames | None = None,
) -> list[Video]:
    """Return a whole generation, see `generate`; with `use_t2i2v` images first, by a model that is freed before the
    video model is built. Collective."""
    config = source.config
    for line in source.notes:
        say(line)
    videos = world.on_main(lambda: plan_videos(config))
    kept = None
    if config.use_t2i2v:
        videos, kept = make_stills(videos, config, world, say, progress)
    system = open_system(source, world, say, kept, share_out(config, videos, world, say))
    return generate(system, config, world, say, progress, videos, take)


def generate(
    system: System,
    config: GenerateConfig,
    world: World,
    say: Say = print,
    progress: OnProgress | None = None,
    videos: Sequence[Video] | None = None,
    take: TakeFrames | None = None,
) -> list[Video]:
    """Make and write every video that the config asks for. Collective: each rank makes its share.

    Files: `save_dir/{video|image}_{resolution}/{save_prefix}{name}[_{k}].mp4` (H.264) or `.png`, with the prompt as it
    was encoded in a `.txt` beside it; by `prompt_folders` `save_dir/prompt-{row}/{k}.mp4` and `prompt.txt`. A name
    in use gets a number, nothing is overwritten. `videos`: the result of `plan_videos`, where known. Returns all
    videos, on every rank, in the order of the prompts. Raises `UserError` where there is no prompt or the model cannot
    make the size, OSError where nothing can be written.
    """
    pixel_shape(system, config.sampling_option)  # raises for a size that the model cannot make
    videos = world.on_main(lambda: plan_videos(config)) if videos is None else list(videos)
    if world.is_main:
        for line in lost_words(config, system.own_encoders.counts, _prompts_as_read(videos, config)):
            say(line)
    videos = make_all(system, videos, config, world, progress, degrees_of(config, system.mesh), take)
    what = "video" if config.sampling_option.num_frames > 1 else "image"
    summary = f"{len(videos)} {what if len(videos) == 1 else f'{what}s'} in {kind_folder(config)}"
    odd = sum(bool(v.prompt.refs) and not v.refs if config.knows_nothing else not v.refs for v in videos)
    user = f'cond_type = "{config.kind}"' if config.kind else "this model"
    unlike = f"with a ref that {user} does not use"
    unlike = unlike if config.knows_nothing else f"of them without a ref, made as {config.family.kind_of_nothing}"
    say(f"{summary}; {odd} {unlike}" if odd else summary)
    if config.grid and world.is_main:
        path = free_path(kind_folder(config), "grid", ".png")
        write_image(path, np.asarray(contact_sheet([(v.prompt.text, read_video(v.path)) for v in videos])))
        say(f"contact sheet: {path}")
    return videos


def make_stills(
    videos: Sequence[Video], config: GenerateConfig, world: World, say: Say = print, progress: OnProgress | None = None
) -> tuple[list[Video], CaptionEncoders | None]:
    """Return the first frames of `use_t2i2v`, in `save_dir/generated_condition`: an image by `img_flux` for each
    video without a reference. Returns the videos with these references, and the image model's text encoders.
    Collective."""
    own = config.of_stills()
    folder, bare = Path(config.save_dir) / STILLS_FOLDER, [video for video in videos if not video.refs]

    paths = world.on_main(lambda: unused_paths(folder, [f"{video.path.stem}.png" for video in bare]))
    firsts = [replace(video.prompt, then=(), strength=None) for video in bare]
    stills = [replace(video, path=path, prompt=prompt) for video, path, prompt in zip(bare, paths, firsts, strict=True)]
    if not stills:
        return list(videos), None
    system = open_system(GenerationSource(own, None), world, say, parallel=share_out(own, stills, world, say))
    stills = make_all(system, stills, own, world, progress, degrees_of(own, system.mesh))
    assert system.encoders is not None, "it was built with its encoders"
    kept = system.encoders.of_captions
    del system
    world.free_memory()
    say(f"{len(stills)} {'image' if len(stills) == 1 else 'images'} in {folder}")
    made = iter(stills)
    return [video if video.refs else replace(video, refs=(str(next(made).path),)) for video in videos], kept


def _prompts_as_read(videos: Sequence[Video], config: GenerateConfig) -> list[str]:
    """All prompts of some videos, those of segments one by one, with their rate and scores."""
    clips = [clip for video in videos for clip in video.prompt.clips]
    cells = [text for clip in clips for text in (clip.text, clip.negative or config.negative_prompt) if text]
    num_frames, has_segments = config.sampling_option.num_frames, config.sample_rules.segments is not None
    parts = [part for cell in cells for part in (captions_in(cell) if has_segments else (cell,))]
    return [final_prompt(config, part, num_frames) for part in parts]


def make_all(
    system: System,
    videos: Sequence[Video],
    config: GenerateConfig,
    world: World,
    progress: OnProgress | None = None,
    degrees: Sequence[int] | None = None,
    take: TakeFrames | None = None,
) -> list[Video]:
    """Sample and write videos, in batches over the ranks; all are written when it returns, with their final paths,
    which differ where another generation took a name meanwhile. Collective.

    Videos with and without references, of other chains, and of other options have rounds of their own. degrees: how
    many sequence peers may make a video together, ascending; None: as many as the mesh has. take: gets the frames of
    each batch, which are then in memory whole. Raises `NotFiniteVideo` on
    every rank when the others are written.
    """
    mesh, written, done = system.mesh, dict[Path, Path](), 0
    faults: list[str] = []
    ranks, degrees = mesh.data_ranks * mesh.sequence, degrees or [mesh.sequence]
    peers: dict[int, TokenPeers] = {}
    for group in alike(videos):
        own, first_prompt = own_config(group[0].prompt, config), group[0].prompt
        batches = batches_of(group, config.batch_size, ranks // degrees[0])
        for numbers, degree in rounds(len(batches), ranks, degrees):
            if system.cut is not None and len(degrees) > 1:
                if degree not in peers:
                    peers[degree] = mesh.token_peers(type(system.denoiser).heads(system.config.model), degree)
                system.cut.use(peers[degree])
            number, place = divmod(mesh.rank, degree * mesh.tensor)
            # a rank without a batch repeats the last: sampling is collective
            batch = batches[numbers[min(number, len(numbers) - 1)]]
            count = sum(len(batches[i]) for i in numbers)

            def on_step(share: float, done: int = done, count: int = count) -> None:
                if progress is not None:
                    progress(done + count * share, len(videos))

            with adapter_strength([expert.denoiser for expert in system.experts], first_prompt):
                chunks = stream_batch(system, batch, own, on_step)
                if number < len(numbers) and place == 0:  # peers make the same videos
                    seen: list[Tensor] = []
                    try:
                        paths = _write(batch, chunks if take is None else _collected(chunks, seen), own)
                        written |= zip((video.path for video in batch), paths, strict=True)
                        if take is not None:
                            take(paths, torch.cat(seen, dim=2))
                    except NotFiniteVideo as fault:  # raised when no rank waits for this one
                        faults.append(str(fault))
                for _ in chunks:  # all of them are made on every rank
                    pass
            done += count
    if faults := [fault for own in world.gather(faults) for fault in own]:
        raise NotFiniteVideo(faults[0])
    places = {planned: path for own in world.gather(written) for planned, path in own.items()}
    return [replace(video, path=places[video.path]) for video in videos]


def sample_batch(
    system: System, batch: Sequence[Video], config: GenerateConfig, on_step: Callable[[float], None] | None = None
) -> Tensor:
    """Return a few videos at once: float32 `[B, 3, T, H, W]` in [-1, 1]. `on_step(share of all steps)` after
    each one."""
    return torch.cat(list(stream_batch(system, batch, config, on_step)), dim=2)


def stream_batch(
    system: System, batch: Sequence[Video], config: GenerateConfig, on_step: Callable[[float], None] | None = None
) -> Iterator[Tensor]:
    """`sample_batch` in chunks of frames, `[B, 3, t, H, W]`; chains of clips are one."""
    watch = None if on_step is None else lambda done, total, x: on_step(done / total)
    system = replace(system, config=config)  # captions are formed by this config, as in the `.txt`
    chains = [clips_of(video, config) for video in batch]
    if all(len(clips) == 1 for clips in chains):
        yield from stream_videos(system, [clip for clip, *_ in chains], config.sampling_option, watch)
    else:
        yield torch.stack(sample_chains(system, chains, config.sampling_option, watch))


def read_video(path: Path) -> np.ndarray:
    """Return the frames of a written video or still: uint8 `[T, H, W, 3]`."""
    return read_image(path) if path.suffix == ".png" else read_frames(path)


def _collected(chunks: Iterator[Tensor], into: list[Tensor]) -> Iterator[Tensor]:
    """Yield the same chunks, which are also added to a list."""
    for chunk in chunks:
        into.append(chunk)
        yield chunk


def _write(videos: Sequence[Video], chunks: Iterator[Tensor], config: GenerateConfig) -> list[Path]:
    """Write videos or stills from their chunks, none of which is kept, and return their paths: numbered where a name
    is in use by now."""
    chunks = (_checked(videos, chunk) for chunk in chunks)
    first = _as_bytes(next(chunks))
    paths = [claim_path(video.path) for video in videos]
    try:
        with ExitStack() as stack:
            if paths[0].suffix == ".png":
                for path, pixels in zip(paths, first, strict=True):
                    write_image(path, pixels[0])
            else:
                size = first.shape[2:4]
                writers = [stack.enter_context(video_writer(path, size, config.fps_save)) for path in paths]
                for chunk in chain([first], map(_as_bytes, chunks)):
                    for add, frames in zip(writers, chunk, strict=True):
                        add(frames)
        for video, path in zip(videos, paths, strict=True):
            frames = config.sampling_option.num_frames
            text = "\n".join(final_prompt(config, clip.text, frames) for clip in video.prompt.clips)
            with naming(path.with_suffix(".txt")):
                path.with_suffix(".txt").write_text(text + "\n", encoding="utf-8")
                if config.prompt_folders and not (first_text := path.with_name("prompt.txt")).exists():
                    durable.replace(path.with_suffix(".txt"), first_text, synced=False)
    except BaseException:
        for path in paths:
            path.with_suffix(".txt").unlink(missing_ok=True)
        raise
    return paths


def _checked(videos: Sequence[Video], chunk: Tensor) -> Tensor:
    """Return a chunk of videos. Raises `NotFiniteVideo`."""
    for video, pixels in zip(videos, chunk, strict=True):
        if not torch.isfinite(pixels).all():
            raise NotFiniteVideo(
                f"{video.path}: the model made values that are NaN or infinite, so no file is written; lower the "
                "strength of adapters, compute in bf16 or fp32, or give other weights"
            )
    return chunk


def _as_bytes(chunk: Tensor) -> np.ndarray:
    """[B, 3, t, H, W] in [-1, 1] -> uint8 [B, t, H, W, 3]."""
    return from_unit(chunk).permute(0, 2, 3, 4, 1).numpy()
