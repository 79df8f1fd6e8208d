"""What a run needs before it is launched: memory by part, step time and MFU, days and GPU-hours, and what would fit.

`parameters` counts weights, `memory` and `speed` are the formulas, `run` applies them to a config, `remedies` finds
what makes a run fit, `probe` measures real steps, `report` writes it down.
"""

from longtake.plan.memory import Layout, Memory, MicroBatch, block_activations, forecast_memory
from longtake.plan.parameters import Upkeep, count_weights
from longtake.plan.probe import Measured, Probed, ProbeStep, check_probe, probe_entries
from longtake.plan.remedies import Remedy, find_remedies, refuse_misfits
from longtake.plan.report import amount, plan_json, write_html
from longtake.plan.run import EntryPlan, Forecast, RunPlan, Work, plan_run
from longtake.plan.speed import Machine, MicroBatchTime, forecast_time, update_seconds

__all__ = [
    "EntryPlan",
    "Forecast",
    "Layout",
    "Machine",
    "Measured",
    "Memory",
    "MicroBatch",
    "MicroBatchTime",
    "ProbeStep",
    "Probed",
    "Remedy",
    "RunPlan",
    "Upkeep",
    "Work",
    "amount",
    "block_activations",
    "check_probe",
    "count_weights",
    "find_remedies",
    "forecast_memory",
    "forecast_time",
    "plan_json",
    "plan_run",
    "probe_entries",
    "refuse_misfits",
    "update_seconds",
    "write_html",
]
