"""From the numbers of a clip table to the order of a pass.

Resolution and aspect tables (`aspect`), the frame-rate rule (`frames`), `bucket_config` (`entries`), which bucket a
clip falls into (`assign`), which bucket fills which slot (`mix`), the order of a pass and its state (`order`), slots
dealt to ranks (`deal`), what was kept and left out (`report`).

Pure NumPy, whole columns at a time; nothing here reads a file or knows a device.
"""

from longtake.buckets.aspect import aspect_table, closest_ratio, frame_size, num_pixels
from longtake.buckets.assign import BucketRule, Draw, Unused, assign, keyed_draw
from longtake.buckets.deal import deal, step_digest
from longtake.buckets.entries import BucketConfig, bucket_config_faults
from longtake.buckets.frames import frame_interval
from longtake.buckets.mix import fill_window
from longtake.buckets.order import OrderInputs, PassOrder, next_pass, plan_pass
from longtake.buckets.report import BucketCount, BucketReport, UnusedCount

__all__ = [
    "BucketConfig",
    "BucketCount",
    "BucketReport",
    "BucketRule",
    "Draw",
    "OrderInputs",
    "PassOrder",
    "Unused",
    "UnusedCount",
    "aspect_table",
    "assign",
    "bucket_config_faults",
    "closest_ratio",
    "deal",
    "fill_window",
    "frame_interval",
    "frame_size",
    "keyed_draw",
    "next_pass",
    "num_pixels",
    "plan_pass",
    "step_digest",
]
