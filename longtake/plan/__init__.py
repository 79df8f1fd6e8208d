"""What a run needs before it is launched: memory by part, step time and MFU, days and GPU-hours, and what would fit.

`parameters` counts weights and `blocks` activations, FLOPs and exchanges of the real model, from which `memory` and
`speed` make a step; `work` reads a config, and `run` applies them to it. `layout` and `machine` are what a plan varies
and assumes, `rates` and `measure` what GPUs reach; `block_traces`, `compiled` and `trace_cache` look at the blocks.
`batches` fills the memory, `remedies` finds what makes a run fit, `probe` measures real steps and `logged`
compares with them; `video` and `validation` forecast sampling, `failures` says what interruptions cost, `report` says
it in words and as data, `page` draws it.
"""

from typing import TYPE_CHECKING

from longtake.lazy import lazy_exports

if TYPE_CHECKING:
    from longtake.plan.blocks import count_blocks
    from longtake.plan.failures import Failures, failure_words, forecast_failures
    from longtake.plan.layout import Layout, MicroBatch, Upkeep
    from longtake.plan.logged import Logged, as_logged, compare_with_log, compare_with_probe, logged_words
    from longtake.plan.machine import CPU, Machine
    from longtake.plan.measure import device_here, device_named, measure_rates, words_of_here
    from longtake.plan.memory import Memory, forecast_memory
    from longtake.plan.page import write_html
    from longtake.plan.parameters import count_weights
    from longtake.plan.probe import Measured, Probed, ProbeStep, as_measured, check_probe, probe_entries
    from longtake.plan.rates import Rates, keep_rates, measured_rates
    from longtake.plan.remedies import Remedy, find_remedies, refuse_misfits
    from longtake.plan.report import amount, plan_json, total_words
    from longtake.plan.run import EntryPlan, Forecast, RunPlan, first_pass, plan_run
    from longtake.plan.speed import MicroBatchTime, forecast_time, update_seconds
    from longtake.plan.validation import ValidationForecast, forecast_validation, validation_rooms
    from longtake.plan.video import VideoForecast, forecast_videos, machine_named, video_words
    from longtake.plan.work import Work, read_layout

__getattr__ = lazy_exports(__name__)
