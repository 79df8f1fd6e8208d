"""Watching a run from beside: validations of its checkpoints, alarms over its curves, and a page to look at.

`watching` is the loop, `judging` makes what one checkpoint shows, `alarms` are pure functions of curves, `telling`
takes them to people, `page` is the HTML page.
"""

from typing import TYPE_CHECKING

from longtake.lazy import lazy_exports

if TYPE_CHECKING:
    from longtake.watch.alarms import Alarm, Curves, find_alarms
    from longtake.watch.page import write_page
    from longtake.watch.telling import read_alarms, way_back
    from longtake.watch.watching import WatchOptions, watch_runs

__getattr__ = lazy_exports(__name__)
