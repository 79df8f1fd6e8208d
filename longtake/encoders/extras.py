"""The libraries of the real encoders, which not every user installs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

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
def needs_extra(key: str, value: str) -> Iterator[None]:
    """Turns an import that fails inside into the sentence that says what to install; what it logs of torchao is not
    shown."""
    try:
        with ExitStack() as stack:
            for logger, words in _OF_TORCHAO:
                stack.enter_context(_unsaid(logging.getLogger(logger), words))
            yield
    except ImportError as error:
        raise UserError(
            f"{key} = {value!r}: needs a library that is not installed ({error.name or error}); "
            "pip install 'longtake[encoders]'"
        ) from None


@contextmanager
def _unsaid(logger: logging.Logger, words: str) -> Iterator[None]:
    """Inside, messages of one logger that have these words in them are dropped."""

    def is_wanted(record: logging.LogRecord) -> bool:
        return words not in record.getMessage()

    logger.addFilter(is_wanted)
    try:
        yield
    finally:
        logger.removeFilter(is_wanted)
