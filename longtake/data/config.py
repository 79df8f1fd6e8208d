"""The `dataset` section of a run's configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, field_validator, model_validator

from longtake.config.section import Section

_SURE_AFTER = 100  # samples: one bad clip among the first ten says nothing of the rest


class DatasetConfig(Section):
    """What is trained on and how clips become samples."""

    data_path: str | None = Field(
        None, description="clip table (.csv, .parquet, .arrow, .json, .jsonl, shards) or folder of clips; or `mix`"
    )
    mix: list[tuple[str, NonNegativeFloat]] | None = Field(
        None,
        min_length=1,
        description="several tables, each with the expected copies of its clips in a pass: [(path, weight), ...]",
    )
    video_repeat: int = Field(
        1, ge=0, le=10_000, description="copies of each video in a pass, beside one of each still; 0: one, too"
    )
    captions: dict[str, NonNegativeFloat] | None = Field(
        None, min_length=1, description="caption columns and their probabilities (any scale); None: column text"
    )
    caption_prefix: str | dict[str, str] = Field(
        "",
        description="what stands before every caption that does not begin with it, such as a trigger word; of a mix "
        "also by its paths, as in {'mine.csv': 'ohwx dog, '}",
    )
    balance: bool = Field(True, description="fill the slots of a step with equal predicted time; False: at random")
    cost: tuple[NonNegativeFloat, NonNegativeFloat, NonNegativeFloat] | Literal["measure"] | None = Field(
        None,
        description="time of a sample of L tokens, a + b L + c L^2, any unit: (a, b, c); None: from the model's FLOPs; "
        '"measure": timed once, before the first step',
    )
    root: str | None = Field(
        None, description="folder or URL that relative paths start from; None: the table's own folder"
    )
    memory_efficient: bool | None = Field(
        None, description="leave numbers and texts on disk, in shards made once beside the table; None: above 256 MB"
    )
    transform_name: Literal["resize_crop"] = Field("resize_crop", description="how frames reach the bucket's size")
    fps_max: float | None = Field(24, gt=0, description="faster clips are read with a stride; None: no ceiling")
    vmaf: bool = Field(True, description="put the motion score (column score_vmafmotion) into the caption")
    cache_mb: float = Field(0, ge=0, description="decoded clips kept by each worker, MB; 0: none")
    timeout_seconds: float = Field(60, ge=0, description="longest time for one clip before it counts as bad; 0: none")
    cache_dir: str | None = Field(
        None, description="folder for clips fetched from servers; None: longtake/clips in the user's cache folder"
    )
    cache_gb: float = Field(
        20, gt=0, allow_inf_nan=False, description="size of `cache_dir`, GB; the least recently used are deleted first"
    )
    download_seconds: float = Field(
        300, gt=0, description="longest time for one clip to come from a server, all attempts together"
    )
    max_bad: int | float | str = Field(
        "5%",
        description="more samples than this that cannot be loaded end the run: share of those tried, or a whole number",
    )
    max_host_gb: float | None = Field(
        None, gt=0, description="most memory for batches made ahead on one machine, GB; None: a quarter of its memory"
    )
    views: int = Field(
        0, ge=0, le=10_000, description="number of different windows of a clip over all passes; 0: one a pass"
    )
    latents: str | None = Field(
        None,
        description="store made by `longtake data encode`: training then holds no autoencoder and no text encoder; "
        '"auto": the one beside the table, made first where it is small enough',
    )
    latents_max_gb: float = Field(
        200, ge=0, description='size up to which `latents = "auto"` makes a store, GB; no more than half the free disk'
    )
    empty_prompt: str | None = Field(
        None,
        description="file with the embedding of the empty prompt, for latents of another program; None: the text "
        "encoder makes it once, where text is dropped",
    )
    latents_missing: Literal["refuse", "online"] = Field(
        "refuse", description="what to do with samples that the store has not; `online`: encode them in training"
    )

    @field_validator("max_bad")
    @classmethod
    def _share_or_count(cls, value: int | float | str) -> int | float | str:
        limit = _limit(value)
        if limit is None or not 0 <= limit <= (1 if isinstance(limit, float) else limit):
            raise ValueError(f'max_bad = {value!r}: write a share such as "5%" or 0.05, or a whole number of samples')
        return value

    @property
    def stored(self) -> bool:
        """Whether the run trains from a latent store that is named."""
        return self.latents not in (None, "auto")

    def most_bad(self, tried: int) -> float:
        """How many of `tried` samples may be bad. Before the hundredth sample, a share is that of a hundred."""
        limit = _limit(self.max_bad)
        assert limit is not None
        return limit * max(tried, _SURE_AFTER) if isinstance(limit, float) else limit

    @model_validator(mode="after")
    def _one_source(self) -> DatasetConfig:
        if (self.data_path is None) == (self.mix is None):
            found = "neither is given" if self.mix is None else "both are given"
            raise ValueError(f"data_path, mix: {found}; give one table as data_path, or several with weights as mix")
        return self

    @model_validator(mode="after")
    def _prefixes_are_of_tables(self) -> DatasetConfig:
        names = {path for path, _ in self.mix or ()} | {self.data_path}
        for name in self.caption_prefix if isinstance(self.caption_prefix, dict) else ():
            if name not in names:
                known = ", ".join(sorted(filter(None, names)))
                raise ValueError(f"caption_prefix: {name!r} is no table of this dataset; choose one of {known}")
        return self

    @model_validator(mode="after")
    def _stored_views_are_counted(self) -> DatasetConfig:
        if self.latents is not None and not self.views:
            asked = "the dataset.views it was made with" if self.stored else "dataset.views = 1 or more"
            raise ValueError(
                f"views = 0: latents = {self.latents!r} holds a fixed number of views of each clip; write {asked}"
            )
        return self

    @model_validator(mode="after")
    def _probabilities_are_some(self) -> DatasetConfig:
        if self.captions is not None and not any(self.captions.values()):
            raise ValueError(f"captions = {self.captions}: at least one probability must be above 0")
        if self.mix is not None and not any(weight for _, weight in self.mix):
            raise ValueError("mix: every weight is 0; give at least one table a weight above 0")
        if isinstance(self.cost, tuple) and not any(self.cost):
            raise ValueError(f"cost = {self.cost}: at least one number must be above 0")
        return self


class DatasetWithoutTable(DatasetConfig):
    """What may be looked at before its table is named."""

    @model_validator(mode="after")
    def _one_source(self) -> DatasetWithoutTable:
        return self if self.data_path is None and self.mix is None else super()._one_source()


def _limit(value: int | float | str) -> int | float | None:
    """Return a number of samples (int) or a share of them (float); None where `value` is neither."""
    if not isinstance(value, str):
        return value
    try:
        return float(value.removesuffix("%")) / 100 if value.endswith("%") else None
    except ValueError:
        return None
