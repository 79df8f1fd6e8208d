"""`Section`: the base of every part of a configuration schema."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One named part of a configuration: typed keys, no unknown ones, immutable once built.

    Packages subclass it to say which keys they take, with which types, defaults and bounds. Defaults are checked like
    given values, so that a schema cannot ship a default it would itself refuse. A validator may raise `ValueError`; its
    text is shown to the user as the rule that was broken.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        arbitrary_types_allowed=False,
        protected_namespaces=(),
    )
