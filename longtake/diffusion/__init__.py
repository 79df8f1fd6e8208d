"""Diffusion as mathematics on tensors: objectives, laws of time, text dropout, known frames, guidance and solvers.

Nothing here knows a network, a device mesh or a file. Latents and predictions are [B, C, F, h, w], times float32 [B].
"""

from __future__ import annotations

from longtake.diffusion.conditions import (
    Encode,
    Kind,
    Window,
    draw_kinds,
    keep_samples,
    known_windows,
    needs_pixels,
    place_known,
    visual_condition,
    with_known,
)
from longtake.diffusion.config import ConditionConfig, DropoutConfig, FlowConfig
from longtake.diffusion.dropout import drop_text
from longtake.diffusion.flow import RectifiedFlow, micro_batch_loss, sample_loss
from longtake.diffusion.guidance import NEGATIVE, NOTHING, PROMPT, GuidanceScales, cfg, cfg_with_frames, guided
from longtake.diffusion.solvers import AdamsBashforth2, Denoise, Euler, Solver, SolverName, make_solver
from longtake.diffusion.timesteps import make_grid, resolution_shift, shift_time, sigmoid_normal

__all__ = [
    "NEGATIVE",
    "NOTHING",
    "PROMPT",
    "AdamsBashforth2",
    "ConditionConfig",
    "Denoise",
    "DropoutConfig",
    "Encode",
    "Euler",
    "FlowConfig",
    "GuidanceScales",
    "Kind",
    "RectifiedFlow",
    "Solver",
    "SolverName",
    "Window",
    "cfg",
    "cfg_with_frames",
    "draw_kinds",
    "drop_text",
    "guided",
    "keep_samples",
    "known_windows",
    "make_grid",
    "make_solver",
    "micro_batch_loss",
    "needs_pixels",
    "place_known",
    "resolution_shift",
    "sample_loss",
    "shift_time",
    "sigmoid_normal",
    "visual_condition",
    "with_known",
]
