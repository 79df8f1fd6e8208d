"""Tiny weights, written once a session. Nobody changes their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.encoders.tiny_weights import sections, tiny_flux


@pytest.fixture(scope="session")
def described(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The sections `ae`, `t5` and `clip` of a config that names them."""
    return sections(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="session")
def weights(described: dict[str, Any]) -> Path:
    """Their folder: `t5`, `clip`, `hunyuan_vae.safetensors`, and `flux_ae.safetensors`."""
    folder = Path(described["t5"]["from_pretrained"]).parent
    tiny_flux(folder / "flux_ae.safetensors")
    return folder
