"""Denoisers: one file for each, the few layers they share, attention, and how their parameters start.

A denoiser is called as `model(x, t, conditions)`; it reads no files, makes no distributed call, and declares as class
data which blocks repeat, how its weights and tokens may be cut over devices, and what a forward pass costs.
"""

from __future__ import annotations

from longtake.models.attention import Attention, AttentionChoice, choose_attention, use_attention
from longtake.models.build import build_denoiser
from longtake.models.config import MMDiTConfig
from longtake.models.initial import held_as, initial_values, initialise
from longtake.models.layers import token_grid
from longtake.models.lora import (
    AdapterSize,
    FrozenLinear,
    LoraConfig,
    LoraLinear,
    adapt,
    freeze,
    frozen_names,
    target_layers,
)
from longtake.models.mmdit import MMDiT
from longtake.models.plans import SequencePlan, TensorSplit

__all__ = [
    "AdapterSize",
    "Attention",
    "AttentionChoice",
    "FrozenLinear",
    "LoraConfig",
    "LoraLinear",
    "MMDiT",
    "MMDiTConfig",
    "SequencePlan",
    "TensorSplit",
    "adapt",
    "build_denoiser",
    "choose_attention",
    "freeze",
    "frozen_names",
    "held_as",
    "initial_values",
    "initialise",
    "target_layers",
    "token_grid",
    "use_attention",
]
