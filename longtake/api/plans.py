"""Forecasts of runs: memory, time and remedies, before anything is launched."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtake.presets import preset_gpus

if TYPE_CHECKING:
    from longtake.plan.run import RunPlan
    from longtake.train.config import RunConfig

_DEFAULT_GPUS = (8, "h200")


@dataclass(frozen=True)
class Plan:
    """The forecast of a run on a number of GPUs of one kind.

        plan = longtake.Run.preset("opensora_v2/stage1").plan(gpus=64, gpu="h200")
        print(plan)
        if not plan.fits:
            print(plan.remedies[0])

    `forecast`: every figure, as the planner has it.
    """

    forecast: RunPlan

    @property
    def fits(self) -> bool:
        """True if every bucket that trains fits the memory of a GPU."""
        return not self.forecast.misfits

    @property
    def step_seconds(self) -> float:
        """Mean seconds of an optimizer step."""
        return self.forecast.forecast.step_seconds

    @property
    def days(self) -> float | None:
        """Days of the whole run; None where its length follows from a clip table that was not given."""
        return self.forecast.forecast.days

    @property
    def gpu_hours(self) -> float | None:
        """GPU-hours of the whole run; None as for `days`."""
        return self.forecast.forecast.gpu_hours

    @property
    def memory_gib(self) -> float:
        """Peak memory per GPU during a step, in GiB, of the bucket that needs most."""
        return max(entry.memory.total for entry in self.forecast.entries) / 2**30

    @property
    def remedies(self) -> tuple[str, ...]:
        """Changes with which a run that does not fit would, the cheapest first; empty where it fits."""
        from longtake.plan.remedies import find_remedies

        return tuple(remedy.words for remedy in find_remedies(self.forecast)) if not self.fits else ()

    def to_json(self) -> dict[str, Any]:
        """Return the forecast as plain data: bytes, seconds and counts, as `longtake plan --json` writes it."""
        from longtake.plan.report import plan_json

        return plan_json(self.forecast)

    def check(self) -> None:
        """Raise `Error` for a run that does not fit, with the cheapest change that would make it fit."""
        from longtake.plan.remedies import refuse_misfits

        refuse_misfits(self.forecast)

    def __str__(self) -> str:
        """Layout, a line per bucket, and the time and cost of the run."""
        from longtake.plan import report

        lines = [report.head_words(self.forecast), report.layout_words(self.forecast)]
        lines += ["  ".join(row) for row in (report.entry_head(self.forecast), *report.entry_rows(self.forecast))]
        return "\n".join([*lines, report.stage_words(self.forecast)])


def plan_config(config: RunConfig, gpus: int, gpu: str, **assumed: Any) -> Plan:
    """Return the plan of a checked config; `assumed`: fields of `plan.machine.Machine`, such as `gpus_per_node`."""
    from longtake.plan.machine import Machine
    from longtake.plan.measure import device_named
    from longtake.plan.rates import measured_rates
    from longtake.plan.run import plan_run

    device = device_named(gpu)
    return Plan(plan_run(config, gpus, Machine(device, measured=measured_rates(device.name), **assumed)))


def default_gpus(source: str) -> tuple[int, str]:
    """Return number and kind of GPUs that a plan is for by default: a preset's, those that a run's folder had, or 8
    H200."""
    return preset_gpus(source) or gpus_of_folder(source) or _DEFAULT_GPUS


def gpus_of_folder(source: str) -> tuple[int, str] | None:
    """Return number and kind of the GPUs that the run in this folder had; None where that is not known."""
    from longtake.plan.machine import CPU
    from longtake.plan.rates import measured_rates
    from longtake.train.health.launches import read_launches

    launches = read_launches(Path(source)) if Path(source).is_dir() else []
    if not launches:
        return None
    device = launches[-1].device
    if device == CPU and not measured_rates(device):
        return None
    return launches[-1].processes, device
