"""Videos of fixed prompts and start images, made from the weights of the moment into the run's folder."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from longtake import durable
from longtake.config.dump import plain_data
from longtake.contracts import UserError
from longtake.evaluate.config import LOSSES_FILE, ValidationConfig
from longtake.generate.checks import prompt_faults
from longtake.generate.config import GenerateConfig
from longtake.generate.options import own_config, seed_of, suffix_of
from longtake.generate.prompts import Prompt, in_one_sentence, read_prompts, split_paths
from longtake.generate.requests import Video, refs_of, shape_of
from longtake.generate.run import NotFiniteVideo, make_all
from longtake.parallel.world import World
from longtake.system.build import System
from longtake.system.config import SystemConfig
from longtake.system.export import said_sampling, system_part, trained_size
from longtake.track.trackers import mend_lines

FOLDER = "validation"
_STEP = re.compile(r"step(\d+)")


@dataclass(frozen=True)
class Validation:
    """What every validation of a run makes."""

    config: GenerateConfig
    prompts: tuple[Prompt, ...]
    ema: bool | Literal["both"]
    offload: bool | Literal["auto"]

    def videos(self, folder: Path) -> list[Video]:
        """Return the videos, to be written into `folder`. Each has a seed of its own, the same every time."""
        option = self.config.sampling_option
        first = option.seed if option.seed is not None else self.config.seed
        return [
            Video(p, seed_of(p, first + p.row), folder / (p.name + suffix_of(p, self.config)), refs_of(p, self.config))
            for p in self.prompts
        ]

    def requests(self) -> list[GenerateConfig]:
        """What is asked for, once of each kind of video: those of a row may be of a size or length of their own."""
        return list({prompt.options: own_config(prompt, self.config) for prompt in self.prompts}.values())

    def make(
        self,
        system: System,
        run: Path,
        step: int,
        world: World,
        on_progress: Callable[[float], None] | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> list[Video] | None:
        """Make all videos of a step; their folder appears when all are written. Collective. Raises `NotFiniteVideo`.

        Every rank makes as many forwards, a rank without a video of its own those of another. `stop` is asked on every
        rank between rounds; where one says yes, nothing is kept, and None is returned. `on_progress` after each step of
        the solver, with the share that is done.
        """
        target = step_folder(run, step)
        partial = target.with_name(f".{target.name}.partial")
        world.on_main(lambda: _begin(partial))
        at_once = self.config.batch_size * system.mesh.data_ranks
        videos = sorted(self.videos(partial), key=lambda video: not video.refs)
        made: list[Video] = []

        def watch(done: float, of: int) -> None:
            if on_progress is not None:
                on_progress((len(made) + done) / len(videos))

        for start in range(0, len(videos), at_once):
            if stop is not None and any(world.gather(stop())):
                world.on_main(lambda: shutil.rmtree(partial, ignore_errors=True))
                return None
            try:
                made += make_all(system, videos[start : start + at_once], self.config, world, watch)
            except NotFiniteVideo:
                world.on_main(lambda: shutil.rmtree(partial, ignore_errors=True))
                raise
        world.on_main(lambda: durable.replace(partial, target))
        made = [replace(video, path=target / video.path.name) for video in made]
        return sorted(made, key=lambda video: video.prompt.row)


def plan_validation(run: SystemConfig, section: ValidationConfig) -> Validation:
    """What a run's validations make. Raises `UserError` for prompts, references and sizes that cannot be used."""
    faults: list[str] = []
    prompts = _prompts(section, run, faults) if section.prompts else []
    config = _request(run, section, any(prompt.refs for prompt in prompts))
    config.check_shape(*shape_of(config))
    faults += prompt_faults(prompts, config) if prompts else []
    if faults:
        raise in_one_sentence("validation", faults, "name other files, or mend their prompts")
    return Validation(config, tuple(prompts), section.ema, section.offload)


def _prompts(section: ValidationConfig, run: SystemConfig, faults: list[str]) -> list[Prompt]:
    companions = run.sample_rules.companions
    if isinstance(section.prompts, str):
        prompts = read_prompts(None, section.prompts, faults=faults, companions=[one.name for one in companions])
    else:
        own = companions[0].name if companions and run.known_law is None else None
        prompts = read_prompts(section.prompts, None)
        references = section.references or ("",) * len(prompts)
        prompts = [
            replace(prompt, refs=split_paths(one)) if own is None else replace(prompt, brings=((own, one),) * bool(one))
            for prompt, one in zip(prompts, references, strict=True)
        ]
    for name in [one.name for one in companions if one.kind == "video"]:
        if lacking := [prompt for prompt in prompts if name not in dict(prompt.brings)]:
            faults.append(f"{lacking[0].text!r} has no {name} video, without which the model makes none")
    return prompts


def _request(run: SystemConfig, section: ValidationConfig, refs: bool) -> GenerateConfig:
    """Return the videos as `longtake generate` would be asked for them, of the size that the run trains."""
    tree = {**plain_data(run), "sampling_option": plain_data(section.sampling_option)}
    whole = {**system_part(tree), "sampling_option": {**said_sampling(tree), **trained_size(tree)}}
    whole |= {"negative_prompt": section.negative_prompt, "batch_size": section.batch_size}
    if isinstance(section.prompts, str):
        whole["prompts"] = section.prompts
    try:
        config = GenerateConfig.model_validate(whole)
        if section.cond_type is None and not refs:
            return config
        kind = section.cond_type or config.kind_of_first_frame
        if kind is None:
            raise UserError("validation.references: this model takes no first frame; leave them out, or name cond_type")
        return GenerateConfig.model_validate({**whole, "cond_type": kind})
    except ValidationError as error:
        fault = error.errors()[0]
        place = ".".join(map(str, ("validation", *fault["loc"])))
        raise UserError(f"{place}: {fault['msg'].removeprefix('Value error, ')}") from None


def step_folder(run: Path, step: int) -> Path:
    return run / FOLDER / f"step{step:06d}"


def missing(run: Path, step: int) -> bool:
    """Whether a run's folder has no validation of a step."""
    return not step_folder(run, step).exists()


def forget_after(run: Path, step: int) -> None:
    """Remove the validations of later steps, and their losses, which the run will make again."""
    mend_lines(run / LOSSES_FILE, step)
    for path in (run / FOLDER).glob("step*"):
        if (found := _STEP.fullmatch(path.name)) and int(found[1]) > step:
            shutil.rmtree(path)


def _begin(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
