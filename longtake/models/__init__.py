"""Denoisers: one file for each, the few layers they share, attention, and how their parameters start.

A denoiser is called as `model(x, t, conditions)`; it reads no files, makes no distributed call, and declares as class
data which blocks repeat, how its weights and tokens may be cut over devices, and what a forward pass costs.
"""

from typing import TYPE_CHECKING

from longtake.lazy import lazy_exports

if TYPE_CHECKING:
    from longtake.models.attention import Attention, TemporalAttention, check_attention
    from longtake.models.build import Denoiser, block_counts, build_denoiser, denoiser_class, example_conditions
    from longtake.models.cogvideox import CogVideoX
    from longtake.models.cogvideox_config import CogVideoXConfig
    from longtake.models.config import LoraConfig, MMDiTConfig, ModelSection
    from longtake.models.initial import held_as, initial_values
    from longtake.models.law import Law, fit
    from longtake.models.lora import AdapterSize, FrozenLinear, LoraLinear, adapt, freeze, frozen_names, target_layers
    from longtake.models.mmdit import MMDiT
    from longtake.models.plans import Exchange, Halo, SequencePlan, Sum, Switch, TensorSplit
    from longtake.models.stdit3 import STDiT3
    from longtake.models.stdit3_config import STDiT3Config
    from longtake.models.trace import Trace, as_on_cuda, attention_on_cuda, meta_conditions
    from longtake.models.ttt_video import TTTVideo
    from longtake.models.ttt_video_config import TTTVideoConfig
    from longtake.models.wan import Wan
    from longtake.models.wan_config import WanConfig

__getattr__ = lazy_exports(__name__)
