"""Model families, one file each: which sections, encoders, laws, files and quirks belong to a denoiser.

Everything above asks for `family_of(config.model)` and names none. A new family is one file here beside its model,
its weight table and, where they are new, its autoencoder and objective; `register` makes it known, from outside too.
"""

from typing import TYPE_CHECKING

from longtake.lazy import lazy_exports

if TYPE_CHECKING:
    from longtake.families.cogvideox import COGVIDEOX
    from longtake.families.opensora_v1_2 import OPENSORA_V1_2
    from longtake.families.opensora_v2 import OPENSORA_V2
    from longtake.families.record import SECTIONS_FILE, Family, Spoken, Text
    from longtake.families.registry import (
        default_model,
        families,
        family_of,
        family_of_tree,
        published_sections,
        read_model,
        register,
    )
    from longtake.families.ttt_video import TTT_VIDEO

__getattr__ = lazy_exports(__name__)
