"""Peak rates of a GPU, from the makers' data sheets: the one table behind live MFU and forecasts."""

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


def _geforce(name: str, processors: int, ghz: float, gib: float, memory_gbs: float, link_gbs: float) -> Gpu:
    """Return a consumer card, by the numbers of its product page: streaming multiprocessors (CUDA cores / 128), boost
    clock.

    A peak is published for few of them: 3090 (NVIDIA's whitepaper on GA102, 71 TFLOP/s), 4090 (on Ada, 165.2), 5090 (on
    RTX Blackwell, 209.5). All three are 512 FLOP a cycle and multiprocessor, dense bf16 with fp32 accumulation, and so
    are the others here.
    """
    title = name.replace("-ti", " Ti").replace("-super", " SUPER")
    return _gpu(name, rf"\bRTX {title}\b", round(processors * ghz * 0.512, 1), gib, memory_gbs, link_gbs)


# Peaks of data centre and workstation cards are those of their makers' data sheets (dense: half of "with sparsity").
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
    _geforce("5090", 170, 2.407, 32, 1792, 64),
    _geforce("5080", 84, 2.617, 16, 960, 64),
    _geforce("5070-ti", 70, 2.452, 16, 896, 64),
    _geforce("5070", 48, 2.512, 12, 672, 64),
    _geforce("5060-ti", 36, 2.572, 16, 448, 32),
    _geforce("5060", 30, 2.497, 8, 448, 32),
    _geforce("4090", 128, 2.52, 24, 1008, 32),
    _geforce("4080-super", 80, 2.55, 16, 736, 32),
    _geforce("4080", 76, 2.505, 16, 717, 32),
    _geforce("4070-ti-super", 66, 2.61, 16, 672, 32),
    _geforce("4070-ti", 60, 2.61, 12, 504, 32),
    _geforce("4070-super", 56, 2.475, 12, 504, 32),
    _geforce("4070", 46, 2.475, 12, 504, 32),
    _geforce("4060-ti", 34, 2.535, 16, 288, 16),
    _geforce("4060", 24, 2.46, 8, 272, 16),
    _geforce("3090-ti", 84, 1.86, 24, 1008, 32),
    _geforce("3090", 82, 1.695, 24, 936, 32),
    _geforce("3080-ti", 80, 1.665, 12, 912, 32),
    _geforce("3080", 68, 1.71, 10, 760, 32),
    _geforce("3070-ti", 48, 1.77, 8, 608, 32),
    _geforce("3070", 46, 1.725, 8, 448, 32),
    _geforce("3060-ti", 38, 1.665, 8, 448, 32),
    _geforce("3060", 28, 1.777, 12, 360, 32),
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
    """Return the entry of a name as people write it, `h200`, `RTX-4090`, `rtx3060`, `4070 Ti`, or of torch's own name.

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
    """Return a name without case, separators, makers' names and forms of boards: `NVIDIA RTX-4090` -> `4090`."""
    letters = re.sub(r"[^a-z0-9]", "", name.lower())
    return _FORM.sub("", _MAKERS.sub("", letters))
