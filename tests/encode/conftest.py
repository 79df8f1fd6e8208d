from tests.train.conftest import clips, config

__all__ = ["clips", "config"]
