"""Imports of the libraries behind the encoders: what they say, and what is said where they are missing."""

from __future__ import annotations

import importlib.util
import logging
import subprocess
import sys

import pytest

from longtake.contracts import UserError
from longtake.encoders.extras import needs_extra

NOISE = (
    ("torchao", "Failed to load %s: no such symbol", "_C.so"),
    ("torchao", "Skipping import of cpp extensions due to incompatible torch version%s", "."),
    ("torch.utils._pytree", "%s is an Enum subclass and is now natively supported", "Kernel"),
    ("diffusers.quantizers.torchao.torchao_quantizer", "Unable to import `torchao` Tensor objects%s", ""),
)


def test_of_an_import_torchao_alone_is_not_heard(caplog: pytest.LogCaptureFixture) -> None:
    with needs_extra("ae.type", "hunyuan_vae"):
        for logger, message, word in NOISE:
            logging.getLogger(logger).warning(message, word)
            logging.getLogger(logger).warning("something else")
    assert [record.getMessage() for record in caplog.records] == ["something else"] * len(NOISE)
    caplog.clear()
    for logger, message, word in NOISE:
        logging.getLogger(logger).warning(message, word)
    assert len(caplog.records) == len(NOISE), "elsewhere all is heard"


@pytest.mark.slow
def test_the_autoencoder_is_imported_without_a_word() -> None:
    if importlib.util.find_spec("torchao") is None:
        pytest.skip("torchao, which makes the noise, is not installed")
    pytest.importorskip("diffusers")
    program = (
        "import torch\nfrom longtake.encoders.autoencoder_config import HunyuanVAEConfig\n"
        "from longtake.encoders.kl import hunyuan_module\n"
        "with torch.device('meta'): hunyuan_module(HunyuanVAEConfig())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_a_library_that_is_missing_is_named() -> None:
    said = r"ae.type = 'x': needs a library .*no_such_library.*'\.\[encoders\]'"
    with pytest.raises(UserError, match=said), needs_extra("ae.type", "x"):
        import no_such_library  # noqa: F401
