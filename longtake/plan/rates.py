"""Rates of GPUs by kind of work: a table from publications, and measurements of `longtake plan --measure`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from longtake.small_files import cache_folder, parse_json, read_small

if TYPE_CHECKING:
    from longtake.track.devices import Gpu

_FORMAT = 2  # of the files with measured rates
_MAY_LACK = ("links", "host")


@dataclass(frozen=True)
class Rates:
    """Of one GPU: FLOP/s, and bytes/s."""

    products: float  # matrix products
    attention: Mapping[int, tuple[float, float]]  # width of a head -> forward; backward, of 2.5 times as many FLOPs
    convolutions: float
    copies: float  # of bytes that are read or written by all other kernels
    links: float | None  # to the other GPUs of its node; None: not measured, so as a plan assumes
    host: float | None  # to its share of the host's memory; None: likewise
    launch: float  # seconds of the host for each kernel that it starts
    said: str  # where they come from

    def attention_of(self, width: int) -> tuple[float, float]:
        """Of heads of this width, or of the nearest that is known."""
        return self.attention[min(self.attention, key=lambda known: abs(known - width))]


@dataclass(frozen=True)
class _Shares:
    """Shares of the data sheet's peaks."""

    products: float
    wide: tuple[float, float]  # attention with heads of 128: forward and backward
    narrow: tuple[float, float]  # of 64
    convolutions: float = 0.15  # a guess from autoencoders in eager mode: 120 to 180 of 989 TFLOP/s
    copies: float = 0.77  # 3.7 of an H200's 4.8 TB/s


# Products: 740 of an H200's 989 TFLOP/s, sustained (a burst reaches 770 to 800). Attention: cuDNN on H100 at 8k to
# 16k tokens, 600 and 517 TFLOP/s at width 128, 413 and 433 at 64 (FlashAttention-3, arXiv:2407.08608).
_HOPPER = _Shares(0.75, (600 / 989, 517 / 989), (413 / 989, 433 / 989))
# FlashAttention-2, arXiv:2307.08691: up to 73 % and 63 % of an A100's peak, and products 80 to 90 % of it.
_AMPERE = _Shares(0.8, (0.73, 0.63), (0.6, 0.52))
_SHARES = {"a100-40gb": _AMPERE, "a100": _AMPERE, "a800": _AMPERE}
_SHARES |= dict.fromkeys(("h200-nvl", "h100-nvl", "h100-pcie", "gh200", "h200", "h800", "h100", "h20"), _HOPPER)
_OTHERS = _AMPERE  # no publication was found: an assumption


def table_rates(gpu: Gpu, links: float, host: float, launch: float) -> Rates:
    """Return the table's, with what a plan assumes of transfers and launches."""
    shares, peak = _SHARES.get(gpu.name, _OTHERS), gpu.peak_flops
    attention = {128: shares.wide, 64: shares.narrow}
    return Rates(
        shares.products * peak,
        {width: (there * peak, back * peak) for width, (there, back) in attention.items()},
        shares.convolutions * peak,
        shares.copies * gpu.memory_bandwidth,
        links,
        host,
        launch,
        f"table of {gpu.name}" + ("" if gpu.name in _SHARES else ", by an a100's shares of its peaks"),
    )


def measured_rates(gpu: str) -> Rates | None:
    """Return the rates measured on this kind of device with this PyTorch, from the user's cache; None for a damaged
    file too."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        found = parse_json(read_small(_file(gpu)))
        widths = {int(width): (_rate(there), _rate(back)) for width, (there, back) in found["attention"].items()}
        numbers = {name: _rate(found[name]) for name in ("products", "convolutions", "copies", "launch")}
        numbers |= {name: None if found[name] is None else _rate(found[name]) for name in _MAY_LACK}
        if widths:
            return Rates(**numbers, attention=widths, said=str(found["said"]))
    return None


def _rate(number: float) -> float:
    if not 0 < number < math.inf:
        raise ValueError(f"{number} is no rate")
    return number


def keep_rates(gpu: str, rates: Rates) -> Rates:
    """Write measured rates into the user's cache, beside what this measurement lacks of an earlier one: attention of
    other widths, links; return what is there."""
    from longtake.durable import write_whole

    if (before := measured_rates(gpu)) is not None:
        lacking = {name: getattr(before, name) for name in _MAY_LACK if getattr(rates, name) is None}
        rates = replace(rates, attention={**before.attention, **rates.attention}, **lacking)
    if (file := _file(gpu)).is_absolute():  # else there is no home
        with suppress(OSError):
            write_whole(file, json.dumps(asdict(rates), indent=1) + "\n", synced=False)
    return rates


def _file(gpu: str) -> Path:
    import torch

    return cache_folder() / "rates" / f"{gpu}-{torch.__version__}-{_FORMAT}.json"
