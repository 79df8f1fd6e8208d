from tests.cli.conftest import longtake, mistake
from tests.train.conftest import clips

__all__ = ["clips", "longtake", "mistake"]
