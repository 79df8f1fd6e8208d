"""A training run: read, prepared, run step by step, saved, resumed, and the stages of a curriculum in a row.

What updates the weights belongs into `optimizer`, what watches over a run into `health`; what a run trains on comes
from `data` and `encode`, what it trains from `system`.
"""

from typing import TYPE_CHECKING

from longtake.lazy import lazy_exports

if TYPE_CHECKING:
    from longtake.train.asking import ask_run, is_training
    from longtake.train.compare import write_comparison
    from longtake.train.config import RunConfig, RunWithoutTable
    from longtake.train.curriculum import EXIT_OTHER_WORLD, train_all
    from longtake.train.folder import new_name
    from longtake.train.health.interrupt import EXIT_NO_FIRST_STEP, ended_by_signals
    from longtake.train.health.launches import read_launches
    from longtake.train.health.watchdog import EXIT_HANG
    from longtake.train.optimizer.update import WeightUpdate
    from longtake.train.preview import preview_buckets, preview_captions, read_previewed
    from longtake.train.report import RunRecord, read_record, run_sections, write_note, write_report
    from longtake.train.run import Outcome, train, train_run
    from longtake.train.run_file import keys_of_generation, read_run, require_startable, words_of_stages

__getattr__ = lazy_exports(__name__)
