"""Rendezvous of processes that were started by hand, by the variables of torch.distributed in the environment.

PyTorch waits for missing processes inside C++, silently and deaf to signals. Here the wait is in Python, after one line
that names the variables which caused it.
"""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Mapping

import torch.distributed as dist

from longtake.contracts import UserError, in_one_line

LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # torchrun sets all of them
_POLL_SECONDS = 0.1
_CONNECT = datetime.timedelta(seconds=0.5)  # of one attempt: signals are handled between two


def launched_as(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """Rank and number of processes by the environment; None where it does not name all of `LAUNCH_VARIABLES`.

    Raises `UserError` for values that are no rank of a world.
    """
    if not all(name in environment for name in LAUNCH_VARIABLES):
        return None
    try:
        rank, size, port = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    except ValueError:
        rank, size, port = -1, 0, 0
    if not (0 <= rank < size and 0 < port < 65536):
        raise UserError(
            f"{_listed(environment)} in the environment: expected 0 <= RANK < WORLD_SIZE and a port below 65536; unset "
            "them to run one process, or start the run with torchrun"
        )
    return rank, size


def join(rank: int, size: int, timeout: datetime.timedelta, environment: Mapping[str, str]) -> dist.Store:
    """Return the store of all processes, once each of them is here; rank 0 hosts it at MASTER_ADDR:MASTER_PORT.

    Raises `UserError` where the port is taken, or processes are still missing after `timeout`.
    """
    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    print(
        f"{_listed(environment)} in the environment: waiting for {size - 1} more of {size} processes at "
        f"{address}:{port}; to run one process, unset {', '.join(LAUNCH_VARIABLES)}",
        file=sys.stderr,
        flush=True,
    )
    end = time.monotonic() + timeout.total_seconds()
    store: dist.TCPStore | None = None
    while time.monotonic() < end:
        try:
            if store is None:
                limit = timeout if rank == 0 else _CONNECT
                store = dist.TCPStore(address, port, size, rank == 0, limit, wait_for_workers=False, multi_tenant=True)
                store.set_timeout(timeout)
                store.add("longtake/arrived", 1)
            if store.add("longtake/arrived", 0) >= size:
                return store
        except dist.DistNetworkError as error:
            if rank == 0:
                text = in_one_line(error)
                raise UserError(
                    f"MASTER_PORT = {port}: cannot listen there ({text}); choose another port, or unset "
                    f"{', '.join(LAUNCH_VARIABLES)} to run one process"
                ) from None
        except dist.DistError:  # rank 0 is not there yet
            pass
        time.sleep(_POLL_SECONDS)
    raise UserError(
        f"{_listed(environment)} in the environment: not all {size} processes came to {address}:{port} in "
        f"{timeout.total_seconds():g} s; start the others, or unset {', '.join(LAUNCH_VARIABLES)}"
    )


def is_torchrun(environment: Mapping[str, str]) -> bool:
    """Return True under torchrun, whose agent starts all processes, stores their addresses and ends them."""
    return "TORCHELASTIC_RUN_ID" in environment


def _listed(environment: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={environment[name]}" for name in LAUNCH_VARIABLES)
