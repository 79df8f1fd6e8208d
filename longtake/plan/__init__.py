"""Forecast of a run before it is launched: memory by part, step time and MFU, days and GPU-hours, and fixes that make
it fit.

`parameters` counts weights and `blocks` activations, FLOPs and exchanges of the real model, from which `memory` and
`speed` make a step; `work` reads a config, and `run` applies them to it. `layout` and `machine` are what a plan varies
and assumes, `rates` and `measure` what GPUs reach; `block_traces`, `compiled` and `trace_cache` look at the blocks.
`batches` fills the memory, `remedies` finds what makes a run fit, `probe` measures real steps and `logged`
compares with them; `video` and `validation` forecast sampling, `failures` says what interruptions cost, `report` says
it in words and as data, `page` draws it.
"""
