"""Health of a run, and its clean end: signals, hangs, lost steps and samples, and the accounting of its time.

`interrupt` ends a run after the current step, `watchdog` ends one that hangs, `left_out` counts skipped steps and
samples that cannot be loaded, `goodput` counts seconds, `launches` records the outcome of each start, `power` the draw
of the GPUs, `ranks` the time of each rank.
"""
