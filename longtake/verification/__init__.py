"""Verification of released weights on a user's machine: against the libraries' own models, in training, against the
plan. `release` finds the files, `parts` compares, `training` trains, `run` puts a report together, `report` writes it.
"""

from typing import TYPE_CHECKING

from longtake.lazy import lazy_exports

if TYPE_CHECKING:
    from longtake.verification.report import Verification, read_verified, verified_table
    from longtake.verification.run import verify

__getattr__ = lazy_exports(__name__)
