"""A launch that says why it failed, and starts again where that helps."""

from __future__ import annotations

import time
from dataclasses import replace

from longtake.cluster.diagnosis import Diagnosis, diagnose
from longtake.cluster.launch import Launch, Launcher, say
from longtake.contracts import EXIT_INTERRUPTED
from longtake.processes import RESTARTS

_PAUSE_SECONDS = 10.0  # for what ran to leave its GPUs, ports and disks


def launch_again_and_again(launch: Launch, restarts: int) -> int:
    """Run a launch until it ends well or of what a restart does not mend, or has been restarted so often; return its
    exit code, as `Launcher.run`.

    Later starts have the job's id of the first, so that training goes on in the same folder from its last checkpoint,
    and leave out hosts that were lost or have lost a GPU: at another number of GPUs the order of samples is the same.
    """
    while True:
        launcher = Launcher(launch)
        code = launcher.run()
        if code in (0, EXIT_INTERRUPTED) or not (ends := launcher.ends()):
            return code
        found = diagnose(ends)
        if found.is_mistake:
            return code
        say(f"diagnosis: {found}")
        launch_after = next_launch(replace(launch, job=launcher.job), found, restarts)
        if launch_after is None:
            return code
        launch = launch_after
        out = f", without {', '.join(sorted(found.without))}" if found.without else ""
        say(f"starts again ({launch.environment[RESTARTS]} of {restarts}){out}")
        try:
            time.sleep(_PAUSE_SECONDS)
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED


def next_launch(launch: Launch, found: Diagnosis, restarts: int) -> Launch | None:
    """Return the launch that follows one which failed so; None where none helps, or as many were made as may be."""
    count = int(launch.environment.get(RESTARTS, "0")) + 1
    hosts = [host for host in launch.hosts if host.label not in found.without]
    if not found.cause.passes or not hosts or count > restarts:
        return None
    first = launch.master_address if hosts[0] == launch.hosts[0] else None
    environment = {**launch.environment, RESTARTS: str(count)}
    return replace(launch, hosts=hosts, environment=environment, master_address=first)
