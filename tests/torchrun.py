"""`python -m tests.torchrun ...`: torchrun whose workers are forks of the tests' server."""

from __future__ import annotations

from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from torch.distributed.run import main

from tests.forks import Forked

if __name__ == "__main__":
    subprocess_handler.Popen = Forked
    main()
