"""The clips of the tests of training."""

from tests.train.conftest import clips  # noqa: F401 - a fixture
