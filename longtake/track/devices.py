"""What one GPU can do at most, from the makers' data sheets: the one table behind live MFU and forecasts."""

from __future__ import annotations

import re
from dataclasses import dataclass

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
    _gpu("rtx-6000-ada", r"\bRTX 6000 Ada\b", 364, 48, 960, 32),
    _gpu("l40s", r"\bL40S\b", 362, 48, 864, 32),
    _gpu("l40", r"\bL40\b", 181, 48, 864, 32),
    _gpu("l4", r"\bL4\b", 121, 24, 300, 32),
    _gpu("a40", r"\bA40\b", 149.7, 48, 696, 32),
    _gpu("a6000", r"\bRTX A6000\b", 154.8, 48, 768, 32),
    _gpu("a10", r"\bA10\b", 125, 24, 600, 32),
    _gpu("5090", r"\bRTX 5090\b", 209.5, 32, 1792, 64),
    _gpu("4090", r"\bRTX 4090\b", 165.2, 24, 1008, 32),
    _gpu("3090", r"\bRTX 3090\b", 71, 24, 936, 32),
    _gpu("mi300x", r"\bMI300X\b", 1307.4, 192, 5300, 448),
)
# The same number on a smaller or larger chip.
_OTHER_CHIPS = re.compile(r"Laptop|Max-Q|\b(4090|5090) D\b|\b\d0[789]0 Ti\b")


def peak_flops(device_name: str) -> float | None:
    """Peak bf16 FLOP/s of one device by the name that torch reports (`torch.cuda.get_device_name()`).

    None where it is not known (a CPU, a new chip); MFU is then left out rather than guessed.
    """
    if _OTHER_CHIPS.search(device_name):
        return None
    return next((gpu.peak_flops for gpu in GPUS if re.search(gpu.pattern, device_name)), None)


def gpu_named(name: str) -> Gpu:
    """The entry of a short name such as `h200` (case, spaces, `rtx` and `_` do not matter), or of torch's own name.

    Raises `UserError` with the list of names.
    """
    plain = re.sub(r"[ _]+", "-", name.strip().lower())
    for gpu in GPUS:
        if plain.removeprefix("nvidia-").removeprefix("geforce-").removeprefix("rtx-") == gpu.name.removeprefix("rtx-"):
            return gpu
    if not _OTHER_CHIPS.search(name):
        for gpu in GPUS:
            if re.search(gpu.pattern, name):
                return gpu
    raise UserError(f"--gpu {name}: not in the table of devices; choose one of {', '.join(g.name for g in GPUS)}")
