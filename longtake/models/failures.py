"""Failures of kernels that are tried on a device."""

from __future__ import annotations

from collections.abc import Callable

import torch

Report = Callable[[str, str], None]  # called with the name of a candidate that failed and the text of its error


def failure_of(error: Exception, device: torch.device) -> str:
    """Return the text of a candidate's error, where the device still works.

    After an illegal access every later call fails, wherever it is made. PyTorch raises `torch.AcceleratorError` for it;
    Triton and CUDA's libraries raise a plain RuntimeError, and the next synchronisation raises the former.
    """
    if isinstance(error, torch.AcceleratorError):
        raise error
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return str(error).strip() or type(error).__name__


def report_to(say: Callable[[str], None], subject: str) -> Report:
    """Report failures by lines of a log or a terminal."""
    return lambda name, text: say(f"{subject}: {name} cannot be used: {text}")
