"""What one GPU can do at most, from the makers' data sheets: the one table behind live MFU and forecasts."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace

from longtake.contracts import UserError


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU. Peaks are of the data sheet: dense bf16 with fp32 accumulation, each link in one direction."""

    name: str  # what `--gpu` calls it
    pattern: str  # of the name that torch reports
    peak_flops: float  # FLOP/s
    memory_gib: float
    memory_bandwidth: float  # bytes/s
    link_bandwidth: float  # bytes/s to the other GPUs of its node: NVLink, or PCIe where there is none


def _gpu(name: str, pattern: str, tflops: float, gib: float, memory_gbs: float, link_gbs: float) -> Gpu:
    return Gpu(name, pattern, tflops * 1e12, gib, memory_gbs * 1e9, link_gbs * 1e9)


# The first pattern that matches counts, so the special form of a chip stands before the plain one.
GPUS: tuple[Gpu, ...] = (
    _gpu("gb200", r"\bGB200\b", 2500, 186, 8000, 900),
    _gpu("b200", r"\bB200\b", 2250, 180, 8000, 900),
    _gpu("h200-nvl", r"\bH200 NVL\b", 835, 141, 4800, 450),
    _gpu("h100-nvl", r"\bH100 NVL\b", 835, 94, 3900, 300),
    _gpu("h100-pcie", r"\bH100 PCIe\b", 756, 80, 2000, 64),
    _gpu("gh200", r"\bGH200\b", 989, 96, 4000, 450),
    _gpu("h200", r"\bH200\b", 989, 141, 4800, 450),
    _gpu("h800", r"\bH800\b", 989, 80, 3350, 200),
    _gpu("h100", r"\bH100\b", 989, 80, 3350, 450),
    _gpu("h20", r"\bH20\b", 148, 96, 4000, 450),
    _gpu("a100-40gb", r"\bA100\b.*\b40GB\b", 312, 40, 1555, 300),
    _gpu("a100", r"\bA100\b", 312, 80, 2039, 300),
    _gpu("a800", r"\bA800\b", 312, 80, 2039, 200),
    _gpu("rtx-pro-6000", r"\bRTX PRO 6000 Blackwell (Workstation|Server) Edition\b", 503.8, 96, 1792, 64),
    _gpu("rtx-6000-ada", r"\bRTX 6000 Ada\b", 364, 48, 960, 32),
    _gpu("rtx-5000-ada", r"\bRTX 5000 Ada\b", 261.1, 32, 576, 32),
    _gpu("rtx-4500-ada", r"\bRTX 4500 Ada\b", 158.5, 24, 432, 32),
    _gpu("rtx-4000-ada", r"\bRTX 4000 Ada\b", 106.9, 20, 360, 32),
    _gpu("l40s", r"\bL40S\b", 362, 48, 864, 32),
    _gpu("l40", r"\bL40\b", 181, 48, 864, 32),
    _gpu("l20", r"\bL20\b", 119.5, 48, 864, 32),
    _gpu("l4", r"\bL4\b", 121, 24, 300, 32),
    _gpu("a40", r"\bA40\b", 149.7, 48, 696, 32),
    _gpu("a30", r"\bA30\b", 165, 24, 933, 32),
    _gpu("a6000", r"\bRTX A6000\b", 154.8, 48, 768, 32),
    _gpu("a5000", r"\bRTX A5000\b", 111.1, 24, 768, 32),
    _gpu("a4500", r"\bRTX A4500\b", 94.6, 20, 640, 32),
    _gpu("a4000", r"\bRTX A4000\b", 76.7, 16, 448, 32),
    _gpu("a10", r"\bA10\b", 125, 24, 600, 32),
    _gpu("5090", r"\bRTX 5090\b", 209.5, 32, 1792, 64),
    _gpu("5080", r"\bRTX 5080\b", 112.6, 16, 960, 64),
    _gpu("5070-ti", r"\bRTX 5070 Ti\b", 87.9, 16, 896, 64),
    _gpu("5070", r"\bRTX 5070\b", 61.7, 12, 672, 64),
    _gpu("5060-ti", r"\bRTX 5060 Ti\b", 47.4, 16, 448, 32),
    _gpu("5060", r"\bRTX 5060\b", 38.4, 8, 448, 32),
    _gpu("4090", r"\bRTX 4090\b", 165.2, 24, 1008, 32),
    _gpu("4080-super", r"\bRTX 4080 SUPER\b", 104.4, 16, 736, 32),
    _gpu("4080", r"\bRTX 4080\b", 97.5, 16, 717, 32),
    _gpu("4070-ti-super", r"\bRTX 4070 Ti SUPER\b", 88.2, 16, 672, 32),
    _gpu("4070-ti", r"\bRTX 4070 Ti\b", 80.2, 12, 504, 32),
    _gpu("4070-super", r"\bRTX 4070 SUPER\b", 71, 12, 504, 32),
    _gpu("4070", r"\bRTX 4070\b", 58.3, 12, 504, 32),
    _gpu("4060-ti", r"\bRTX 4060 Ti\b", 44.1, 16, 288, 16),
    _gpu("4060", r"\bRTX 4060\b", 30.2, 8, 272, 16),
    _gpu("3090-ti", r"\bRTX 3090 Ti\b", 80, 24, 1008, 32),
    _gpu("3090", r"\bRTX 3090\b", 71, 24, 936, 32),
    _gpu("3080-ti", r"\bRTX 3080 Ti\b", 68.2, 12, 912, 32),
    _gpu("3080", r"\bRTX 3080\b", 59.5, 10, 760, 32),
    _gpu("3070-ti", r"\bRTX 3070 Ti\b", 43.5, 8, 608, 32),
    _gpu("3070", r"\bRTX 3070\b", 40.6, 8, 448, 32),
    _gpu("3060-ti", r"\bRTX 3060 Ti\b", 32.4, 8, 448, 32),
    _gpu("3060", r"\bRTX 3060\b", 25.5, 12, 360, 32),
    _gpu("mi300x", r"\bMI300X\b", 1307.4, 192, 5300, 448),
)
# The same number on a smaller chip.
_OTHER_CHIPS = re.compile(r"Laptop|Max-Q|\b(4090|5090) D\b")
_MAKERS = re.compile(r"^(nvidia|amd|geforce|quadro|tesla|instinct|rtx)+")
_FORM = re.compile(r"(sxm\d?|hbm\d?e?|generation|edition|workstation|server|blackwell)")  # of a board, not of a chip
_MEMORY = re.compile(r"(?<!\d)(\d+)[ -]?gi?b\b", re.IGNORECASE)


def peak_flops(device_name: str) -> float | None:
    """Peak bf16 FLOP/s of one device by the name that torch reports (`torch.cuda.get_device_name()`).

    None where it is not known (a CPU, a new chip); MFU is then left out rather than guessed.
    """
    if _OTHER_CHIPS.search(device_name):
        return None
    return next((gpu.peak_flops for gpu in GPUS if re.search(gpu.pattern, device_name)), None)


def gpu_named(name: str) -> Gpu:
    """The entry of a name as people write it, `h200`, `RTX-4090`, `rtx3060`, `4070 Ti`, or of torch's own name.

    Case, separators and makers' names do not matter. A size in the name, `3080 12GB`, counts in place of the table's.
    Raises `UserError` with the nearest names.
    """
    gpu = _entry(name)
    if gpu is None and (size := _MEMORY.search(name)):
        gpu = _entry(_MEMORY.sub("", name))
        # makers count 192 GB where programs can use 180 GiB
        if gpu is not None and abs(int(size[1]) - gpu.memory_gib) > 0.1 * gpu.memory_gib:
            gpu = replace(gpu, memory_gib=float(size[1]))
    if gpu is None and not _OTHER_CHIPS.search(name):
        gpu = next((entry for entry in GPUS if re.search(entry.pattern, name)), None)
    if gpu is not None:
        return gpu
    names = [gpu.name for gpu in GPUS]
    near = difflib.get_close_matches(_plain(name), names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise UserError(
        f"--gpu {name}: not in the table of devices; {hint}choose one of {', '.join(names)}, the nearest of your GPU "
        "with its --memory-gib and --peak-tflops"
    )


def _entry(name: str) -> Gpu | None:
    return next((gpu for gpu in GPUS if _plain(gpu.name) == _plain(name)), None)


def _plain(name: str) -> str:
    """A name without case, separators, makers' names and forms of boards: `NVIDIA RTX-4090` -> `4090`."""
    letters = re.sub(r"[^a-z0-9]", "", name.lower())
    return _FORM.sub("", _MAKERS.sub("", letters))
