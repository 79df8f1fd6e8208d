"""The config section of trackers, as keys of the run itself."""

from __future__ import annotations

from pydantic import Field

from longtake.config.section import Section


class TrackingConfig(Section):
    """Destinations of a run's metrics in addition to `metrics.jsonl`."""

    tensorboard: bool = Field(True, description="write TensorBoard files into the run folder")
    wandb: bool = Field(False, description="also log to Weights & Biases")
    wandb_shared: bool = Field(False, description="`longtake watch` may write into the W&B run while it trains")
    wandb_project: str = Field("longtake", description="its project")
    wandb_entity: str | None = Field(None, description="the user or team it belongs to; None: the account's default")
