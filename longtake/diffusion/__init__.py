"""Diffusion as mathematics on tensors: objectives, laws of time, text dropout, known places, guidance and solvers.

Nothing here knows a network, a device mesh or a file. Latents and predictions are [B, C, F, h, w], times float32 [B].
"""

from typing import TYPE_CHECKING

from longtake.lazy import lazy_exports

if TYPE_CHECKING:
    from longtake.diffusion.config import (
        Flow1000Config,
        FlowConfig,
        NoisePredictionConfig,
        ObjectiveSection,
        ShiftedFlowConfig,
        VPredictionConfig,
    )
    from longtake.diffusion.dropout import drop_text
    from longtake.diffusion.flow import RectifiedFlow, StraightFlow
    from longtake.diffusion.flow_1000 import Flow1000
    from longtake.diffusion.flow_shifted import ShiftedFlow
    from longtake.diffusion.guidance import NEGATIVE, NOTHING, PROMPT, GuidanceRule, GuidanceScales, Guided
    from longtake.diffusion.known import (
        KNOWN_NOISE,
        NOTHING_KNOWN,
        ONE_REF,
        ByKind,
        KnownLaw,
        Places,
        Refs,
        Window,
        frames_to_make,
        keep_known,
        kinds_by_weight,
        known_holder,
        make_known,
        noise_on_known,
        read_known,
        with_box,
        with_held,
    )
    from longtake.diffusion.noise_prediction import NoisePrediction
    from longtake.diffusion.objective import Objective, build_objective, micro_batch_loss, sample_loss
    from longtake.diffusion.solvers import AdamsBashforth2, Euler, Solver
    from longtake.diffusion.timesteps import make_grid, resolution_shift, shift_time, sigmoid_normal
    from longtake.diffusion.v_prediction import VPrediction
    from longtake.diffusion.windows import EndWindows

__getattr__ = lazy_exports(__name__)
