from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.servers import ROOT, SSHD, Site, site, wait_for_end
from tests.train.conftest import clips

__all__ = ["clips"]


@pytest.fixture(scope="module")
def found() -> Iterator[dict[str, Any]]:
    """What the tests of `make cluster` found, by test; at the end of a file it goes into LONGTAKE_CLUSTER_JSON, beside
    what others have found."""
    figures: dict[str, Any] = {}
    yield figures
    if name := os.environ.get("LONGTAKE_CLUSTER_JSON"):
        file = Path(name)
        before = json.loads(file.read_text(encoding="utf-8"))["figures"] if file.exists() else {}
        sys.path.insert(0, str(ROOT / "benchmarks"))
        machine = import_module("machine")
        ours = {key: {**figure, "commit": machine.commit_of(ROOT)} for key, figure in figures.items()}
        machine.write_json(file, "cluster", before | ours, "tests/cluster")


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Two SSH servers, `alpha` and `beta`."""
    if SSHD is None:
        pytest.skip("no SSH server here; tools/install_test_tools.sh installs one")
    with site(tmp_path_factory.mktemp("site")) as place:
        yield place


@pytest.fixture
def place(servers: Site) -> Iterator[Site]:
    """The servers, for a test that leaves no process behind."""
    yield servers
    wait_for_end(servers, 60)
