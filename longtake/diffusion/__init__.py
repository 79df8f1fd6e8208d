"""Diffusion as mathematics on tensors: objectives, laws of time, text dropout, guidance and solvers.

Nothing here knows a network, a device mesh or a file. Latents and predictions are [B, C, F, h, w], times float32 [B].
"""

from __future__ import annotations

from longtake.diffusion.config import DropoutConfig, FlowConfig
from longtake.diffusion.dropout import drop_text
from longtake.diffusion.flow import RectifiedFlow, micro_batch_loss, sample_loss
from longtake.diffusion.guidance import NEGATIVE, NOTHING, PROMPT, GuidanceScales, cfg, cfg_with_frames, guided
from longtake.diffusion.solvers import Denoise, Euler, Solver
from longtake.diffusion.timesteps import make_grid, resolution_shift, shift_time, sigmoid_normal

__all__ = [
    "NEGATIVE",
    "NOTHING",
    "PROMPT",
    "Denoise",
    "DropoutConfig",
    "Euler",
    "FlowConfig",
    "GuidanceScales",
    "RectifiedFlow",
    "Solver",
    "cfg",
    "cfg_with_frames",
    "drop_text",
    "guided",
    "make_grid",
    "micro_batch_loss",
    "resolution_shift",
    "sample_loss",
    "shift_time",
    "sigmoid_normal",
]
