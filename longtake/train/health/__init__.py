"""What keeps a run going, and has it end well: signals, hangs, steps and samples that are lost, where its time goes.

`interrupt` ends a run after the current step, `watchdog` one that hangs, `left_out` counts steps that are left out
and samples that cannot be loaded, `goodput` counts seconds, `launches` keeps what each start
came to, `power` what GPUs draw, `ranks` what each rank takes for itself.
"""
