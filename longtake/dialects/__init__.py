"""The command lines and run files of other systems, in their own words, as runs of Longtake."""

from longtake.dialects.opensora_v2 import OpenSora

__all__ = ["OpenSora"]
