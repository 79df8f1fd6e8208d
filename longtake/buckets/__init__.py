"""From the numbers of a clip table to the order of a pass.

Resolution and aspect tables (`aspect`), the ways of other systems as data (`laws`), `bucket_config` (`entries`), what a
bucket law is asked (`protocol`), the options of one in a config (`section`), which bucket a clip falls into
(`assignment`), what the order of a pass depends on (`inputs`), all samples of a pass by bucket (`sweep`), what a micro-
batch costs and which bucket fills which slot (`mix`), clips held back for validation (`held_back`), the order of a
pass, its state and its files (`order`), kept beside the table (`kept_orders`), slots dealt to ranks (`dealing`), what
was kept, trimmed and left out (`report`), drawn (`page`).

Pure NumPy, whole columns at a time; nothing here knows a device.
"""
