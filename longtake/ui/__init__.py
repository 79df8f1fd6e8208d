"""The page in a browser (`longtake ui`): generate, runs, data and adapters, over what the command line does.

`server` opens it, `gate` and `roots` say who may see what, `queue` runs commands one after another; each tab
has a file.
"""

from typing import TYPE_CHECKING

from longtake.lazy import lazy_exports

if TYPE_CHECKING:
    from longtake.ui.server import serve

__getattr__ = lazy_exports(__name__)
