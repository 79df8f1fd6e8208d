"""Prompts to videos: reading prompts, sampling, writing files and contact sheets."""

from __future__ import annotations

from longtake.generate.config import GenerateConfig
from longtake.generate.prompts import Prompt, read_prompts
from longtake.generate.requests import Video, check_request
from longtake.generate.run import generate, generate_from, open_system, read_video
from longtake.generate.sample import Request, sample_videos
from longtake.generate.sheet import contact_sheet
from longtake.generate.source import OF_TRAINING, Source, load_weights, read_generation, resolve_source

__all__ = [
    "OF_TRAINING",
    "GenerateConfig",
    "Prompt",
    "Request",
    "Source",
    "Video",
    "check_request",
    "contact_sheet",
    "generate",
    "generate_from",
    "load_weights",
    "open_system",
    "read_generation",
    "read_prompts",
    "read_video",
    "resolve_source",
    "sample_videos",
]
