"""Longtake trains video diffusion transformers. `docs/` has one page per task; packages follow the way of a clip."""

from longtake._version import __version__
