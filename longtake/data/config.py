"""The `dataset` section of a run's configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from longtake.config import Section


class DatasetConfig(Section):
    """What is trained on and how clips become samples."""

    data_path: str = Field(description="clip table: .csv, .parquet or .arrow, as made by `longtake data probe`")
    root: str | None = Field(None, description="folder that relative paths start from; None: the table's own folder")
    transform_name: Literal["resize_crop"] = Field("resize_crop", description="how frames reach the bucket's size")
    fps_max: float | None = Field(24, gt=0, description="faster clips are read with a stride; None: no ceiling")
    vmaf: bool = Field(True, description="put the motion score (column score_vmafmotion) into the caption")
    cache_mb: float = Field(0, ge=0, description="decoded clips kept by each worker, MB; 0: none")
    timeout_seconds: float = Field(60, ge=0, description="longest time for one clip before it counts as bad; 0: none")
    views: int = Field(0, ge=0, description="number of different windows of a clip over all passes; 0: one a pass")
