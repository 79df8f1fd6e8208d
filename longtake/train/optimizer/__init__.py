"""The update of a step: AdamW over shards (its kernels, moments and where they live), learning rates, the EMA.

`update` puts it together; `sharded` is the optimizer, `adamw` its formula, `quantise` and `rounding` its short formats,
`storage` where tensors live between steps, `schedule` the learning rate, `ema` the moving average of the weights.
"""
