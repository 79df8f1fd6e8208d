"""Diffusion as mathematics on tensors: objectives, laws of time, text dropout, known places, guidance and solvers.

Nothing here knows a network, a device mesh or a file. Latents and predictions are [B, C, F, h, w], times float32 [B].
"""
