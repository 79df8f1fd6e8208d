"""What keeps a run going, and has it end well: signals, hangs, steps and samples that are lost, where its time goes.

`interrupt` ends a run after the current step, `watchdog` one that hangs, `left_out` counts steps that are left out
and samples that cannot be loaded, `goodput` counts seconds, `launches` keeps what each start
came to, `power` what GPUs draw, `ranks` what each rank takes for itself.
"""

from typing import TYPE_CHECKING

from longtake.lazy import lazy_exports

if TYPE_CHECKING:
    from longtake.train.health.goodput import Stopwatch
    from longtake.train.health.interrupt import (
        REQUESTS,
        FirstStepTimer,
        StopRequest,
        ended_by_signals,
        held_signals,
        read_flags,
        request_file,
        seconds_left,
    )
    from longtake.train.health.launches import LaunchRecord, note_end, noted_launch, read_launches
    from longtake.train.health.left_out import LostSamples, SkippedSteps
    from longtake.train.health.power import NodePower
    from longtake.train.health.ranks import RankTimes
    from longtake.train.health.state import Health
    from longtake.train.health.watchdog import Watchdog, collective_timeout, record_collectives

__getattr__ = lazy_exports(__name__)
