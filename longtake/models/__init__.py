"""Denoisers: one file for each, the few layers they share, attention, and how their parameters start.

A denoiser is called as `model(x, t, conditions)`; it reads no files, makes no distributed call, and declares as class
data which blocks repeat, how its weights and tokens may be cut over devices, and what a forward pass costs.
"""

from __future__ import annotations

from longtake.models.attention import Attention
from longtake.models.build import build_denoiser
from longtake.models.config import MMDiTConfig
from longtake.models.initial import initialise
from longtake.models.mmdit import MMDiT
from longtake.models.plans import SequencePlan, TensorSplit

__all__ = [
    "Attention",
    "MMDiT",
    "MMDiTConfig",
    "SequencePlan",
    "TensorSplit",
    "build_denoiser",
    "initialise",
]
