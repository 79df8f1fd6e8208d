"""A launch that says why it failed, and starts again where that helps."""

from __future__ import annotations

import sys
import time
from dataclasses import replace

from longtake.cluster.diagnosis import diagnose
from longtake.cluster.launch import Launch, Launcher
from longtake.contracts import EXIT_INTERRUPTED
from longtake.processes import RESTARTS

_PAUSE_SECONDS = 10.0  # for what ran to leave its GPUs, ports and disks


def launch_again_and_again(launch: Launch, restarts: int) -> int:
    """Runs a launch until it ends well or of what a restart does not mend, or has been restarted so often; returns its
    exit code, as `Launcher.run`.

    Later starts have the job's id of the first, so that training goes on in the same folder from its last checkpoint,
    and leave out hosts that were lost or have lost a GPU: at another number of GPUs the order of samples is the same.
    """
    for count in range(restarts + 1):
        launcher = Launcher(launch)
        code = launcher.run()
        if code in (0, EXIT_INTERRUPTED) or not (ends := launcher.ends()):
            return code
        found = diagnose(ends)
        _say(f"diagnosis: {found}")
        hosts = [host for host in launch.hosts if host.label not in found.without]
        if not found.cause.passes or not hosts or count == restarts:
            return code
        out = f", without {', '.join(sorted(found.without))}" if found.without else ""
        _say(f"starts again ({count + 1} of {restarts}){out}")
        first = launch.master_address if hosts[0] == launch.hosts[0] else None
        environment = {**launch.environment, RESTARTS: str(count + 1)}
        launch = replace(launch, hosts=hosts, environment=environment, master_address=first, job=launcher.job)
        try:
            time.sleep(_PAUSE_SECONDS)
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
    raise AssertionError("the loop returns")


def _say(sentence: str) -> None:
    print(f"longtake launch: {sentence}", file=sys.stderr, flush=True)
