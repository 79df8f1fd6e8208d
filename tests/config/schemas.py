"""A small schema with everything a real one has, and how the tests write files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from longtake.config.faults import ConfigError, Fault
from longtake.config.load import load_config
from longtake.config.section import Section

AnyTree = dict[str, Any]


class Optim(Section):
    cls: Literal["adamw", "sgd"] = "adamw"
    lr: float = 1e-4
    eps: float = 1e-8
    betas: tuple[float, float] = (0.9, 0.99)


class Mmdit(Section):
    type: Literal["mmdit"] = "mmdit"
    depth: int = Field(1, ge=1)
    hidden_size: int = 64
    grad_ckpt_settings: tuple[int, int] | None = None
    from_pretrained: str | None = None


class Stdit(Section):
    type: Literal["stdit"]
    depth: int = 1
    qk_norm: bool = True


class Dataset(Section):
    data_path: str
    views: int = 1


class Run(Section):
    dataset: Dataset = Dataset(data_path="clips.csv")
    model: Annotated[Mmdit | Stdit, Field(discriminator="type")] = Mmdit()
    optim: Optim = Optim()
    bucket_config: dict[str, dict[int, tuple[float | tuple[float, float], int]]] = Field(default_factory=dict)
    lr: float = 1e-4
    steps: int = 10
    every: int = Field(0, description="steps between reports; 0: never")
    warmup_steps: int | None = None
    wandb: bool = False
    name: str = "run"
    load: str | list[str] | None = None
    tags: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def check_warmup(self) -> Run:
        if self.warmup_steps is not None and self.warmup_steps > self.steps:
            raise ValueError(f"warmup_steps = {self.warmup_steps}: the run has {self.steps} steps; take fewer")
        return self


def write(folder: Path, **texts: str) -> Path:
    """Write `name.py` for each text (`name_toml` becomes name.toml); returns the path of the last one."""
    for name, text in texts.items():
        path = folder / (f"{name[:-5]}.toml" if name.endswith("_toml") else f"{name}.py")
        path.write_text(text, encoding="utf-8")
    return path


def load(path: Path, *flags: str) -> AnyTree:
    """The merged tree of a file, with no schema but "names and anything"."""
    return load_config(path, flags, AnyTree).value


def faults(path: Path, *flags: str, schema: Any = AnyTree) -> list[Fault]:
    """The faults of a configuration that has some."""
    try:
        load_config(path, flags, schema)
    except ConfigError as error:
        return error.faults
    raise AssertionError("the configuration has no faults")
