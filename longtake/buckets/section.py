"""`SizesSection`: options of a bucket law that a family brings, in place of `bucket_config`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any, ClassVar

from pydantic import Field

from longtake.buckets.protocol import BucketLaw
from longtake.config.section import OpenSection


class SizesSection(OpenSection):
    """What the `sizes` section of every such law has; a subclass adds a `type` of one literal and its options."""

    LAW: ClassVar[str]  # "module:function", which is given the section and the run's config

    type: str = Field(description="how sizes and lengths are drawn")

    def law(self, config: Any) -> BucketLaw:
        """Return the law of a run's config. Raises `UserError` for options that give no buckets."""
        return resolve_name(self.LAW)(self, config)

    @abstractmethod
    def sampled(self, config: Any) -> dict[str, Any]:
        """Return the size keys of `sampling_option` that a run under this law is sampled at; `config`: what its model
        is."""

    @classmethod
    def tiny(cls, tree: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys that shrink such a section, given as plain data, to what a CPU handles in seconds."""
        return {}
