"""Watching a run from inside: trackers (JSONL, TensorBoard, Weights & Biases), meters of speed and memory, progress.

`trackers` writes numbers down, `meters` makes them, `progress` shows them on the terminal.
"""

from longtake.track.meters import PEAK_BF16_FLOPS, StepMeter, memory, peak_flops
from longtake.track.progress import TrainingProgress, make_console
from longtake.track.trackers import METRICS_FILE, Trackers, read_lines

__all__ = [
    "METRICS_FILE",
    "PEAK_BF16_FLOPS",
    "StepMeter",
    "Trackers",
    "TrainingProgress",
    "make_console",
    "memory",
    "peak_flops",
    "read_lines",
]
