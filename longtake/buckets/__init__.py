"""From the numbers of a clip table to the order of a pass.

Resolution and aspect tables (`aspect`), the ways of other systems as data (`laws`), the frame-rate rule (`frames`),
`bucket_config` (`entries`), which bucket a clip falls into (`assign`), all samples of a pass by bucket (`sweep`), what
a micro-batch costs (`balance`), which bucket fills which slot (`mix`), the order of a pass and its state (`order`), its
files (`share`), slots dealt to ranks (`deal`), what was kept, trimmed and left out (`report`).

Pure NumPy, whole columns at a time; nothing here knows a device, and only `share` touches files.
"""

from longtake.buckets.aspect import aspect_table, closest_ratio, frame_size, num_pixels
from longtake.buckets.assign import BucketRule, Draw, Unused, assign, keyed_draw
from longtake.buckets.balance import CostModel, fit_cost
from longtake.buckets.deal import Forward, deal, step_digest
from longtake.buckets.entries import BucketConfig, bucket_config_faults
from longtake.buckets.frames import frame_interval
from longtake.buckets.mix import fill_window
from longtake.buckets.order import OrderInputs, PassOrder, next_pass, plan_pass
from longtake.buckets.report import BucketCount, BucketReport, UnusedCount
from longtake.buckets.share import open_order, order_summary, write_order

__all__ = [
    "BucketConfig",
    "BucketCount",
    "BucketReport",
    "BucketRule",
    "CostModel",
    "Draw",
    "Forward",
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
    "fit_cost",
    "frame_interval",
    "frame_size",
    "keyed_draw",
    "next_pass",
    "num_pixels",
    "open_order",
    "order_summary",
    "plan_pass",
    "step_digest",
    "write_order",
]
