"""Cost of failures: how often a run is interrupted, how often to save, and the share of its time that counts.

The interval between checkpoints is Daly's ("A higher order estimate of the optimum checkpoint interval", 2006), whose
first term is Young's sqrt(2 x stall x time between interruptions). A run stands still only while its tensors are
copied; they are written while it trains, and a checkpoint that is not complete when a node fails is lost with the steps
after the one before it. Nodes fail independently, at exponential times.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, sqrt

from longtake.pages import duration
from longtake.plan.layout import FP32
from longtake.plan.run import RunPlan

_DAY = 86400.0
_AGREEING = 0.5  # seconds in which all ranks come to a save and begin it
_COMPILING = 60.0  # seconds of the first step with a warm cache of compiled code


@dataclass(frozen=True)
class Failures:
    """Interruptions of a run, and the cost of each interruption and each checkpoint; all in seconds."""

    between: float  # interruptions of any of its nodes, on average
    restart: float  # from an interruption to the first step after it
    stall: float  # the run stands still for a checkpoint
    write: float  # from then on until it is complete

    @property
    def interval(self) -> float:
        """Between checkpoints, so that least is lost; no shorter than writing one takes."""
        share = self.stall / (2 * self.between)
        if share >= 1:
            return max(self.between, self.write)
        daly = sqrt(2 * self.stall * self.between) * (1 + sqrt(share) / 3 + share / 9) - self.stall
        return max(daly, self.write, 1.0)

    def goodput(self, interval: float) -> float:
        """Return the share of time in steps that count, with a checkpoint every so many seconds: 0 to 1.

        Of an interval and its stall, which are begun anew until no interruption falls into them (Daly, equation 20).
        """
        lost = (self.restart + self.write) / self.between
        spent = (interval + self.stall) / self.between
        if lost + spent > 700:  # beyond what a float holds: nothing is ever finished
            return 0.0
        return interval / (self.between * exp(lost) * (exp(spent) - 1))


def forecast_failures(plan: RunPlan) -> Failures:
    """Forecast the failures of a planned run."""
    machine, layout, weights = plan.machine, plan.layout, plan.weights
    nodes = max(1, layout.gpus // machine.gpus_per_node)
    a_weight = layout.upkeep.master_bytes + layout.upkeep.moments_bytes + FP32 * layout.ema
    own = weights.owned * a_weight  # bytes of one rank's part of a checkpoint
    node = own * min(layout.weight_shards, machine.gpus_per_node)
    loaded = node + plan.work.encoder_bytes
    first = plan.forecast.step_seconds + _COMPILING * layout.compiled
    return Failures(
        between=_DAY / (machine.interruptions * nodes),
        restart=machine.relaunch + loaded / machine.storage + first if machine.restart is None else machine.restart,
        stall=_AGREEING + own / machine.host if machine.stall is None else machine.stall,
        write=node / machine.storage,
    )


def failure_words(plan: RunPlan) -> str:
    """Return the interruptions to be expected, the best interval between checkpoints and the goodput, in one line."""
    failures, machine = forecast_failures(plan), plan.machine
    step, every = plan.forecast.step_seconds, plan.work.config.ckpt_every
    best = max(1, round(failures.interval / step)) if step else 1
    said = (
        f"failures: one interruption in {duration(failures.between)} ({machine.interruptions:.2g} a node-day: "
        f"--interruptions), the next step {duration(failures.restart)} later (--restart-seconds); a checkpoint stops "
        f"the run for {duration(failures.stall)} (--save-seconds) and is complete {duration(failures.write)} later "
        f"(--storage-gbs); ckpt_every = {best:,} ({duration(best * step)}) loses least: "
        f"goodput {failures.goodput(best * step):.2%}"
    )
    if every and every != best:
        said += f", {failures.goodput(every * step):.2%} with {every:,} as set"
    return said


def failures_json(plan: RunPlan) -> dict[str, float]:
    """Return the same as plain data: seconds, interruptions a day, shares."""
    failures, step, every = forecast_failures(plan), plan.forecast.step_seconds, plan.work.config.ckpt_every
    return {
        "interruptions_a_day": _DAY / failures.between,
        "restart_seconds": failures.restart,
        "stall_seconds": failures.stall,
        "write_seconds": failures.write,
        "interval_seconds": failures.interval,
        "goodput": failures.goodput(failures.interval),
        "goodput_as_set": failures.goodput(every * step) if every else 0.0,
    }
