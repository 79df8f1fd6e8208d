"""The command lines and run files of other systems, with their own keys, as runs of Longtake."""

from typing import TYPE_CHECKING

from longtake.lazy import lazy_exports

if TYPE_CHECKING:
    from longtake.dialects.cogvideox_fun import CogVideoXFun
    from longtake.dialects.opensora_v1_2 import OpenSoraV12
    from longtake.dialects.opensora_v2 import OpenSora
    from longtake.dialects.scripts import script_run
    from longtake.dialects.ttt_video import TTTVideoDialect
    from longtake.dialects.written import written_in

__getattr__ = lazy_exports(__name__)
