"""Choice of the denoiser that a step trains, of two: a draw by the step's number, the same on every rank and after a
restart."""

from __future__ import annotations

from dataclasses import dataclass

from longtake.random import Purpose, uniforms
from longtake.system.build import System
from longtake.train.config import RunConfig

EXPERTS = "high_noise", "low_noise"  # in the order of `System.experts`


@dataclass(frozen=True)
class ExpertDraw:
    """The denoiser of each step of a run, as its place in `System.experts`.

    All samples of a step train the same one, so that no rank waits for another's. With `share` as the law of times has
    it, samples get the times of one model's law: a side of the boundary by its share, then a time of the law's part on
    that side.
    """

    seed: int
    stage: int
    share: float  # of steps that train the second; 0 where there is one denoiser

    @classmethod
    def of_run(cls, config: RunConfig, system: System) -> ExpertDraw:
        """Create the draw of a run whose denoisers are built."""
        low_noise = config.low_noise
        share: float | None = 0.0
        if low_noise is not None:
            share = low_noise.share
            if share is None:
                share = system.whole_objective.share_below(low_noise.boundary)
        assert share is not None, "the config refuses objectives whose times have no parts"
        return cls(config.seed, config.stage_number, share)

    def __call__(self, step: int) -> int:
        """Return the denoiser of the optimizer step after `step` others."""
        if not self.share:
            return 0
        return int(uniforms(self.seed, self.stage, Purpose.EXPERT, 0, step, 1)[0, 0] < self.share)
