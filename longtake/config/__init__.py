"""How a run is written down: files read as data, inheritance with late binding, flags, checked schemas, clear faults.

`Section` is the base of every schema. `load_config` turns a file, its bases and the command line's flags into a checked
value; `resolve` does so without a file; `dump_config` writes a file that reads back equal; `describe` lists every value
with where it comes from; `key_names` tells one kind of file from another. A mistake of the user is a `ConfigError` that
carries all its `Fault`s.
"""

from typing import TYPE_CHECKING

from longtake.lazy import lazy_exports

if TYPE_CHECKING:
    from longtake.config.dump import dump_config, literal
    from longtake.config.faults import ConfigError, Fault
    from longtake.config.load import Dialect, Heights, Resolved, describe, key_names, load_config, resolve
    from longtake.config.section import OpenSection, Section
    from longtake.config.tree import Origin

__getattr__ = lazy_exports(__name__)
