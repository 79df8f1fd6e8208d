"""The libraries of the real encoders, which not every user installs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from longtake.contracts import UserError


@contextmanager
def needs_extra(key: str, value: str) -> Iterator[None]:
    """Turns an import that fails inside into the sentence that says what to install."""
    try:
        yield
    except ImportError as error:
        raise UserError(
            f"{key} = {value!r}: needs a library that is not installed ({error.name or error}); "
            "pip install 'longtake[encoders]'"
        ) from None
