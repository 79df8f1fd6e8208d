"""Failures, as PyTorch, NCCL, Linux and Longtake tell them: each is named, and restarted where that helps.

Those that a CPU can have are provoked in tests/cluster/test_provoked.py; the texts stand for GPUs, NVLink and NCCL.
"""

from __future__ import annotations

import pytest

from longtake.cluster.diagnosis import Cause, HostEnd, diagnose

STEP = "step 340/1000  loss 0.41  grad_norm 1.2"
PEER = [
    "[rank8]: Traceback (most recent call last):",
    '[rank8]:   File "loop.py", line 88, in train',
    "[rank8]: torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3384, remote process exited or "
    "there was a network error, NCCL version 2.27.3",
]
LOST = ["longtake: rank 8: the connection to another process of the run is lost, which ended first; see its messages"]
WATCHDOG = [
    "[rank3]:[E ProcessGroupNCCL.cpp:632] [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=81, "
    "OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600013 milliseconds before timing out.",
    "terminate called after throwing an instance of 'c10::DistBackendError'",
]


def traceback(*lines: str) -> list[str]:
    return ["Traceback (most recent call last):", '  File "train.py", line 3, in <module>', "    train()", *lines]


ALPHA, BETA = "alpha", "beta"
# name: what alpha said and its code, what beta said and its code, the cause, the host, the hosts left out
FAILURES = {
    "the cable of a node": ([STEP, *PEER], 1, [STEP], None, Cause.NODE_AWAY, BETA, {BETA}),
    "a node that froze": ([STEP, *WATCHDOG], -6, [STEP], None, Cause.NO_PROGRESS, ALPHA, {BETA}),
    "a node without power": ([STEP, *LOST], 2, [STEP], None, Cause.NODE_AWAY, BETA, {BETA}),
    "a GPU off the bus": (
        [STEP, *PEER], 1,
        [*traceback("torch.AcceleratorError: CUDA error: unspecified launch failure")], 1,
        Cause.GPU_LOST, BETA, {BETA},
    ),
    "memory of a GPU beyond repair": (
        [*traceback("RuntimeError: CUDA error: uncorrectable ECC error encountered")], 1, [*PEER], 1,
        Cause.GPU_LOST, ALPHA, {ALPHA},
    ),
    "a GPU away before the start": (
        ["longtake: --nproc_per_node: process 7 finds only 7 CUDA devices on this node; start one process for each"], 2,
        [STEP, *LOST], 2, Cause.GPU_LOST, ALPHA, {ALPHA},
    ),
    "NVLink": (
        [*traceback("RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution")], 1, PEER, 1,
        Cause.GPU_LOST, ALPHA, {ALPHA},
    ),
    "a collective that never ends": ([STEP, *WATCHDOG], -6, [STEP, *PEER], 1, Cause.NO_PROGRESS, ALPHA, set()),
    "a rank that makes no step": ([STEP], 76, [STEP], 76, Cause.NO_PROGRESS, ALPHA, set()),
    "no first step": (["reading clips.parquet"], 75, [], 75, Cause.NO_PROGRESS, ALPHA, set()),
    "an adapter of InfiniBand that flaps": (
        [*traceback("torch.distributed.DistBackendError: NCCL error: ncclRemoteError: A call failed")], 1, PEER, 1,
        Cause.NO_PROGRESS, ALPHA, set(),
    ),
    "a connection between nodes that all processes outlive": ([*LOST], 2, [*LOST], 2, Cause.NO_PROGRESS, ALPHA, set()),
    "a full disk": (
        ["longtake: /runs/a/epoch0-global_step200: the disk is full (No space left on device)"],
        2, [STEP, *LOST], 2, Cause.DISK_FULL, ALPHA, set(),
    ),
    "a quota": (
        [*traceback("OSError: [Errno 122] Disk quota exceeded: 'metrics.jsonl'")], 1, LOST, 2,
        Cause.DISK_FULL, ALPHA, set(),
    ),
    "memory of a GPU": (
        [*traceback("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")],
        1, PEER, 1, Cause.OUT_OF_MEMORY, ALPHA, set(),
    ),
    "memory of a host": (
        [*traceback("RuntimeError: DefaultCPUAllocator: can't allocate memory")], 1, LOST, 2,
        Cause.OUT_OF_MEMORY, ALPHA, set(),
    ),
    "a bug": (PEER, 1, [*traceback("KeyError: 'fps'")], 1, Cause.BUG, BETA, set()),
    "a shape": (
        [*traceback("RuntimeError: The size of tensor a (4) must match the size of tensor b (3)")], 1, PEER, 1,
        Cause.BUG, ALPHA, set(),
    ),
    "a mistake in the command": (
        ["longtake: lr = -1: must be above 0"], 2, ["longtake: lr = -1: must be above 0"], 2, Cause.BUG, ALPHA, set(),
    ),
    "a segmentation fault": ([STEP], -11, [STEP, *LOST], 2, Cause.BUG, ALPHA, set()),
    "SIGKILL from somebody": ([STEP], -9, [STEP, *LOST], 2, Cause.KILLED, ALPHA, set()),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_is_named_and_only_what_passes_is_started_again(name: str) -> None:
    said, code, other, other_code, cause, host, without = FAILURES[name]
    first_is_beta = host == BETA or (other_code is None and code != -6)
    ends = [HostEnd(ALPHA, code, said, not first_is_beta), HostEnd(BETA, other_code, other, first_is_beta)]
    for order in (ends, ends[::-1]):
        found = diagnose(order)
        assert (found.cause, found.without) == (cause, without), found
        assert found.host == host or cause is Cause.NO_PROGRESS or code == other_code  # which both say
        assert found.cause.passes == (cause in (Cause.NODE_AWAY, Cause.GPU_LOST, Cause.NO_PROGRESS))


def test_warnings_and_errors_that_were_caught_are_no_cause() -> None:
    said = [
        "longtake: /runs: 12 GB are free there and the next checkpoint needs 40 GB; make room",
        STEP,
    ]
    caught = [*traceback("ValueError: broken.mp4: no frames"), *[STEP] * 90]
    assert diagnose([HostEnd(ALPHA, 76, [*caught, *said])]).cause is Cause.NO_PROGRESS
    assert diagnose([HostEnd(ALPHA, 1, [STEP])]).cause is Cause.UNKNOWN
