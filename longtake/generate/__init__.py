"""Prompts to videos: reading prompts, sampling, writing files and contact sheets."""

from typing import TYPE_CHECKING

from longtake.lazy import lazy_exports

if TYPE_CHECKING:
    from longtake.generate.checks import check_request
    from longtake.generate.config import GenerateConfig
    from longtake.generate.prompts import Prompt, read_prompts
    from longtake.generate.read import OF_TRAINING, read_generation
    from longtake.generate.requests import Video, prompts_of
    from longtake.generate.run import NotFiniteVideo, generate, generate_from, open_system, read_video
    from longtake.generate.sample import Request, sample_videos
    from longtake.generate.sheet import contact_sheet
    from longtake.generate.source import GenerationSource, load_weights, resolve_source

__getattr__ = lazy_exports(__name__)
