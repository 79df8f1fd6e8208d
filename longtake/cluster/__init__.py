"""A run on many machines: started over ssh, watched, and ended together; or handed to Slurm."""

from typing import TYPE_CHECKING

from longtake.lazy import lazy_exports

if TYPE_CHECKING:
    from longtake.cluster.arguments import Host, forwarded, name_and_folder, read_hosts
    from longtake.cluster.diagnosis import Cause, Diagnosis, HostEnd, diagnose
    from longtake.cluster.health import METRICS, MONITORING, RunHealth, exposition, node_samples
    from longtake.cluster.here import launch_here
    from longtake.cluster.launch import Launch, Launcher, show
    from longtake.cluster.metrics_server import exporter
    from longtake.cluster.nodes import THROTTLING, Nodes, RunOnNode, runs_of
    from longtake.cluster.restarts import launch_again_and_again, next_launch
    from longtake.cluster.slurm import SlurmJob, require_slurm, resumable, show_job, submit

__getattr__ = lazy_exports(__name__)
