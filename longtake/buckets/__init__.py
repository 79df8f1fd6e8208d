"""From the numbers of a clip table to the order of a pass.

Resolution and aspect tables (`aspect`), the ways of other systems as data (`laws`), `bucket_config` (`entries`), what a
bucket law is asked (`protocol`), the options of one in a config (`section`), which bucket a clip falls into
(`assignment`), what the order of a pass depends on (`inputs`), all samples of a pass by bucket (`sweep`), what a micro-
batch costs and which bucket fills which slot (`mix`), clips held back for validation (`held_back`), the order of a
pass, its state and its files (`order`), kept beside the table (`kept_orders`), slots dealt to ranks (`dealing`), what
was kept, trimmed and left out (`report`), drawn (`page`).

Pure NumPy, whole columns at a time; nothing here knows a device.
"""

from typing import TYPE_CHECKING

from longtake.lazy import lazy_exports

if TYPE_CHECKING:
    from longtake.buckets.aspect import aspect_table, closest_ratio, frame_size, lists_sizes, num_pixels
    from longtake.buckets.assignment import BucketRule, assign, frame_interval, register_law
    from longtake.buckets.dealing import Forward, deal, step_digest
    from longtake.buckets.entries import bucket_config_faults
    from longtake.buckets.held_back import choose_held_back
    from longtake.buckets.inputs import OrderInputs
    from longtake.buckets.kept_orders import plan_kept
    from longtake.buckets.mix import CostModel, fill_window, fit_cost
    from longtake.buckets.order import PassOrder, open_order, order_summary, plan_pass, write_order
    from longtake.buckets.page import bucket_picture
    from longtake.buckets.protocol import BucketDraw, BucketLaw, Columns, Timing, Unused, keyed_draw, view_of
    from longtake.buckets.report import BucketReport
    from longtake.buckets.section import SizesSection

__getattr__ = lazy_exports(__name__)
