"""`Run`: a run file, preset or run folder with changed keys, and what can be done with it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from longtake.api.plans import Plan, default_gpus, plan_config
from longtake.api.settings import flags_of
from longtake.api.source import found_run
from longtake.contracts import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from longtake.config.load import Dialect, Row
    from longtake.diffusion.objective import Objective
    from longtake.train.config import RunConfig


@dataclass(frozen=True)
class GeneratedVideo:
    """A video or image that `Run.generate` made."""

    frames: Tensor  # uint8 [T, H, W, 3]; an image has T = 1
    path: Path  # of its file, .mp4 or .png
    prompt: str
    seed: int


@dataclass(frozen=True)
class Run:
    """A run: where its keys come from, and the keys that were set over them. Nothing is read until it is needed.

        run = longtake.Run.preset("demo/shapes").set({"dataset.data_path": "clips.parquet"}, tiny=True)
        print(run.plan(gpus=1, gpu="h200"))
        trained = run.train()
        video = trained.generate("a red square")[0]
        print(video.path, video.frames.shape)

    A run is not changed by its methods: `set` and `train` return another one.
    """

    source: str  # a run file, or a run's folder
    overrides: tuple[str, ...] = ()  # flags, as the command line has them
    dialect: Dialect | None = field(default=None, repr=False)

    @classmethod
    def preset(cls, name: str) -> Run:
        """Return the run of a preset, as `longtake preset` lists them. Raises `Error` for a name that is not one.

        run = longtake.Run.preset("wan/lora_1_3b")
        """
        from longtake.presets import find_preset, nearest_preset

        if (file := find_preset(name)) is None:
            meant = nearest_preset(name)
            fix = f"write {meant}" if meant else "`longtake preset` lists them"
            raise UserError(f"{name}: expected the name of a preset; {fix}")
        return cls(str(file))

    @classmethod
    def load(cls, path: str | os.PathLike[str], stage: str | None = None) -> Run:
        """Return the run of a config file (.py or .toml), read as data, or of an earlier run's folder, which is
        continued.

            run = longtake.Run.load("outputs/demo")

        `stage`: of a file with stages, the one that is meant. Raises `Error` where there is no such file or folder.
        """
        from longtake.dialects.written import written_in

        source = found_run(os.fspath(path))
        stages = () if stage is None else ("--stage", stage)
        return cls(source, stages, written_in(source, stages))

    def set(self, values: Mapping[str, Any] = MappingProxyType({}), /, *, tiny: bool = False, **top_level: Any) -> Run:
        """Return the run with other values of some keys, by their dotted names; keys without a dot may be keywords.

            run = run.set({"optim.lr": 1e-4}, max_steps=1000)

        `tiny`: shrink the run to a size that a CPU trains in seconds, as `--tiny` does. Keys are checked when the run
        is read (`config`), all at once. Raises `Error` for a value that a run file cannot have.
        """
        shrunk = ("--tiny",) if tiny and "--tiny" not in self.overrides else ()
        return replace(self, overrides=(*self.overrides, *shrunk, *flags_of({**values, **top_level})))

    @property
    def config(self) -> RunConfig:
        """Every key, checked and typed. Raises `Error` that names each mistake."""
        from longtake.train.run_file import read_run

        return read_run(self.source, self.overrides, dialect=self.dialect).value

    @property
    def config_without_table(self) -> RunConfig:
        """The same for a use that reads no clips: `dataset.data_path` may be missing."""
        from longtake.train.config import RunWithoutTable
        from longtake.train.run_file import read_run

        return read_run(self.source, self.overrides, RunWithoutTable, self.dialect).value

    def settle(self) -> tuple[Row, ...]:
        """Every key with its value and the place that it comes from, as `longtake config show` prints them.

            for row in run.settle():
                print(row.key, row.value, row.origin)

        A run's folder has the values that its launch decided in place of "auto", and after the keys a row
        `choices.NAME` for each choice by free memory that its last checkpoint records. Raises `Error` as `config`.
        """
        from longtake.api.shown import recorded_choices, shown_keys

        return (*shown_keys(self.source, self.overrides, self.dialect).rows, *recorded_choices(self.source))

    def plan(self, gpus: int | None = None, gpu: str | None = None, **machine: Any) -> Plan:
        """Forecast memory, step time and cost on `gpus` GPUs of a kind, without launching anything.

            plan = run.plan(gpus=8, gpu="h200")
            print(plan.fits, plan.step_seconds, plan.memory_gib)

        Defaults: a preset's own GPUs, those that a run's folder had, or 8 x h200. `machine`: fields of
        `longtake.plan.machine.Machine`, such as `gpus_per_node=4`. Raises `Error` for a kind that is not known.
        """
        default_count, default_kind = default_gpus(self.source)
        return plan_config(self.config_without_table, gpus or default_count, gpu or default_kind, **machine)

    def train(self, objective: type[Objective] | None = None) -> Run:
        """Train to the last step, or until Ctrl-C, and return the run of the folder that was written.

            trained = run.train()
            print(trained.checkpoint)

        `objective`: a subclass of `longtake.diffusion.objective.Objective`, used in place of the config's. Its
        qualified name and the hash of its source are saved in each checkpoint, and a resume without it is refused.

        When it returns, also by an error, signal handlers, garbage collection, PyTorch's threads and settings, and the
        process group are as they were before. Under torchrun every process calls it. Raises `Error` for a mistake in
        the run; an exception of the objective passes through unchanged, with a note that names the last checkpoint.
        """
        from longtake.api.process import refuse_process_group, restored_process
        from longtake.train.run import train_run

        refuse_process_group("Run.train")
        with restored_process():
            outcome = train_run(self.source, self.overrides, dialect=self.dialect, objective=objective)
        return Run(str(outcome.folder))

    @property
    def checkpoint(self) -> Path | None:
        """Last whole checkpoint of a run's folder; None for a folder without one, a run file and a preset."""
        from longtake.checkpoint.runs import list_checkpoints

        whole = [info.path for info in list_checkpoints(self.source) if info.complete]
        return whole[-1] if whole else None

    def generate(
        self, prompt: str | Sequence[str], values: Mapping[str, Any] = MappingProxyType({}), /, **top_level: Any
    ) -> list[GeneratedVideo]:
        """Make a video for each prompt with the trained weights, and write them to files.

            videos = trained.generate(["a cat", "a dog"], {"sampling_option.num_steps": 20}, save_dir="samples")
            print(videos[0].frames.shape)

        `values`: keys of generation, by their dotted names, over those of `set`. Returns the videos that this process
        made, in the order of the prompts, which is all of them outside of torchrun. Raises `Error` for a mistake,
        before a model is built where possible.
        """
        from longtake.api.generation import generate_videos
        from longtake.api.process import refuse_process_group, restored_process

        refuse_process_group("Run.generate")
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        flags = (*self.overrides, *flags_of({"prompt": prompts, **values, **top_level}))
        with restored_process():
            made = generate_videos(self.source, flags, self.dialect)
        return [GeneratedVideo(frames, video.path, video.prompt.text, video.seed) for video, frames in made]
