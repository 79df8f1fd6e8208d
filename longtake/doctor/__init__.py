"""Why a model makes noise, or a run is slow: checks of its data, encoders, weights and training, causes ranked."""

from typing import TYPE_CHECKING

from longtake.lazy import lazy_exports

if TYPE_CHECKING:
    from longtake.doctor.finding import Finding
    from longtake.doctor.run import Examination, examine

__getattr__ = lazy_exports(__name__)
