"""Watching a run from inside: trackers (JSONL, TensorBoard, Weights & Biases), meters of speed and memory, progress.

`trackers` writes numbers down, `meters` makes them, `progress` shows them on the terminal, `devices` knows what a GPU
can do at most.
"""

from typing import TYPE_CHECKING

from longtake.lazy import lazy_exports

if TYPE_CHECKING:
    from longtake.track.config import TrackingConfig
    from longtake.track.devices import GPUS, Gpu, gpu_named, peak_flops
    from longtake.track.meters import StepMeter, memory
    from longtake.track.progress import TrainingProgress, make_console, task_progress
    from longtake.track.trackers import (
        METRICS_FILE,
        WANDB_ID_FILE,
        TrackedRun,
        TrackedVideo,
        Trackers,
        append_line,
        mend_lines,
        offline_line,
        read_lines,
        require_wandb_login,
    )

__getattr__ = lazy_exports(__name__)
