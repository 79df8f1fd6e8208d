"""The demo: the whole way from clips on disk to judged videos, on made-up shapes, with the product's own steps."""

from typing import TYPE_CHECKING

from longtake.lazy import lazy_exports

if TYPE_CHECKING:
    from longtake.demo.place import usual_name
    from longtake.demo.run import DemoOutcome
    from longtake.demo.start import run_demo
    from longtake.demo.together import ALL, run_all

__getattr__ = lazy_exports(__name__)
