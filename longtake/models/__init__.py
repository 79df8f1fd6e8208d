"""Denoisers: one file for each, the few layers they share, attention, and how their parameters start.

A denoiser is called as `model(x, t, conditions)`; it reads no files, makes no distributed call, and declares as class
data which blocks repeat, how its weights and tokens may be cut over devices, and what a forward pass costs.
"""
