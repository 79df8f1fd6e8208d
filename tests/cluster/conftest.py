from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.servers import SSHD, Site, site, wait_for_end
from tests.train.conftest import clips

__all__ = ["clips"]


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
