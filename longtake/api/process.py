"""The calling process around a training: refused where it cannot host one, and restored when it returns."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from longtake.contracts import UserError
from longtake.processes import ENDING_SIGNALS


def refuse_process_group(call: str) -> None:
    """Raise `UserError` if torch.distributed is initialized: Longtake joins and leaves its own process group."""
    if dist.is_initialized():
        raise UserError(
            f"{call}: expected no process group, found torch.distributed initialized; call "
            "torch.distributed.destroy_process_group() first"
        )


@contextmanager
def restored_process() -> Iterator[None]:
    """Restore on exit, also after an error, what a training changes in its process.

    Signal handlers, garbage collection, PyTorch's threads, its determinism, TF32 and attention settings, and
    environment variables. The process group is left by `start_world`.
    """
    is_main_thread = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in ENDING_SIGNALS}
    collects = gc.isenabled()
    num_threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    matmul_tf32 = torch.backends.cuda.matmul.allow_tf32
    cudnn_tf32 = torch.backends.cudnn.allow_tf32
    benchmark = torch.backends.cudnn.benchmark
    cudnn_attention = torch.backends.cuda.cudnn_sdp_enabled()
    variables = dict(os.environ)
    inductor = sys.modules.get("torch._inductor.config")
    inductor_deterministic = False if inductor is None else inductor.deterministic
    try:
        yield
    finally:
        if is_main_thread:
            for number, handler in handlers.items():
                if handler is not None:  # None: a handler that was not set from Python
                    signal.signal(number, handler)
        if collects:
            gc.enable()
        else:
            gc.disable()
        torch.set_num_threads(num_threads)
        torch.use_deterministic_algorithms(deterministic, warn_only=warns_only)
        torch.backends.cuda.matmul.allow_tf32 = matmul_tf32
        torch.backends.cudnn.allow_tf32 = cudnn_tf32
        torch.backends.cudnn.benchmark = benchmark
        torch.backends.cuda.enable_cudnn_sdp(cudnn_attention)
        for name in os.environ.keys() - variables.keys():
            del os.environ[name]
        os.environ.update(variables)
        if (inductor := sys.modules.get("torch._inductor.config")) is not None:
            setattr(inductor, "deterministic", inductor_deterministic)  # noqa: B010 - it is not in PyTorch's types
