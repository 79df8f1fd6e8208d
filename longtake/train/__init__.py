"""Training: the loop, the run's state and folder, optimizer, schedule and averages."""

from longtake.train.clock import Clock
from longtake.train.config import OptimizerConfig, RunConfig
from longtake.train.curriculum import EXIT_OTHER_WORLD, train_all
from longtake.train.folder import read_run
from longtake.train.interrupt import EXIT_INTERRUPTED, EXIT_NO_FIRST_STEP, ended_by_signals
from longtake.train.preview import preview_buckets, read_previewed
from longtake.train.run import Outcome, train, train_run
from longtake.train.schedule import learning_rate
from longtake.train.stages import keys_of_generation
from longtake.train.watchdog import EXIT_HANG

__all__ = [
    "EXIT_HANG",
    "EXIT_INTERRUPTED",
    "EXIT_NO_FIRST_STEP",
    "EXIT_OTHER_WORLD",
    "Clock",
    "OptimizerConfig",
    "Outcome",
    "RunConfig",
    "ended_by_signals",
    "keys_of_generation",
    "learning_rate",
    "preview_buckets",
    "read_previewed",
    "read_run",
    "train",
    "train_all",
    "train_run",
]
