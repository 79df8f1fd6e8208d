"""Watching a run from inside: trackers (JSONL, TensorBoard, Weights & Biases), meters of speed and memory, progress.

`trackers` writes numbers down, `meters` makes them, `progress` shows them on the terminal, `devices` knows what a GPU
can do at most.
"""

from longtake.track.devices import GPUS, Gpu, gpu_named, peak_flops
from longtake.track.meters import StepMeter, memory
from longtake.track.progress import TrainingProgress, make_console
from longtake.track.trackers import METRICS_FILE, Trackers, read_lines

__all__ = [
    "GPUS",
    "METRICS_FILE",
    "Gpu",
    "StepMeter",
    "Trackers",
    "TrainingProgress",
    "gpu_named",
    "make_console",
    "memory",
    "peak_flops",
    "read_lines",
]
