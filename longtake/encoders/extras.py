"""The libraries of the real encoders, which not every user installs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from longtake.contracts import UserError

# diffusers imports torchao where it finds it. What the two, and PyTorch, then say of torchao's kernels and tensor
# types is no concern of a run, which uses neither: logger -> a part of the message.
_OF_TORCHAO = (
    ("torchao", "Failed to load"),
    ("torchao", "Skipping import of cpp extensions"),
    ("torch.utils._pytree", "is an Enum subclass"),
    ("diffusers.quantizers.torchao.torchao_quantizer", "Unable to import `torchao`"),
)


@contextmanager
def needs_extra(key: str, value: str, extra: str = "encoders") -> Iterator[None]:
    """Turn an import that fails inside into the sentence that says what to install; what it logs of torchao is not
    shown."""
    loggers = {logging.getLogger(name) for name, _ in _OF_TORCHAO}
    for logger in loggers:
        logger.addFilter(_is_wanted)
    try:
        yield
    except ImportError as error:
        raise UserError(
            f"{key} = {value!r}: needs a library that is not installed ({error.name or error}); "
            f"pip install '.[{extra}]' in Longtake's folder"
        ) from None
    finally:
        for logger in loggers:
            logger.removeFilter(_is_wanted)


def _is_wanted(record: logging.LogRecord) -> bool:
    return not any(record.name == name and part in record.getMessage() for name, part in _OF_TORCHAO)
