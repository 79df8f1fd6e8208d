"""Variables of NCCL and Gloo that follow from a host's topology and that they do not find by themselves.

Runs on the host, beside `host`: the standard library alone.
"""

from __future__ import annotations

import fcntl
import glob
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

_SIOCGIFADDR = 0x8915  # netdevice(7)
_NO_WAY_OUT = ("lo", "docker")  # NCCL leaves them out too
# What users set by the books; the launch explains it beside its own choice.
MEANING = {
    "NCCL_P2P_LEVEL": "how near GPUs must be to read each other's memory; NCCL finds NVLink and PCIe switches itself",
    "NCCL_NET_GDR_LEVEL": "how near a card must be to read a GPU's memory; NCCL finds it from the PCIe tree",
    "NCCL_IB_HCA": "InfiniBand or RoCE cards to use; with = in front whole names",
    "NCCL_IB_PCI_RELAXED_ORDERING": "writes may overtake each other on PCIe; NCCL does so where the card can",
    "NCCL_IB_GID_INDEX": "address of a RoCE card; NCCL chooses one of RoCE v2 itself since 2.21",
    "NCCL_SOCKET_IFNAME": "interface over which processes find each other; with = in front its whole name",
    "GLOO_SOCKET_IFNAME": "the same for groups of the CPU",
    "NCCL_DEBUG": "what NCCL prints: by default nothing, not even the reason of an error",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "a failed collective ends the process; PyTorch's default",
    "TORCH_NCCL_ENABLE_MONITORING": "a thread watches over the watchdog; PyTorch's default",
}


class _Card(NamedTuple):
    name: str
    layer: str  # InfiniBand or Ethernet
    rate: float  # Gb/s
    path: list[str]  # in the tree of PCIe

    def __str__(self) -> str:
        return f"{self.name} ({self.layer}, {self.rate:g} Gb/s)"


def derive(
    gpus: Sequence[str], address: str, root: str = "/sys", own: Mapping[str, str] | None = None
) -> dict[str, list[str]]:
    """(value, reason) of each variable to set. `gpus`: their PCI addresses, as nvidia-smi has them; `address`: at which
    other hosts reach this one; `root`: of sysfs; `own`: addresses of interfaces, by default as the kernel says."""
    if not gpus:
        return {}
    found = {"NCCL_DEBUG": ["WARN", "errors are told with their reason"]}
    cards = _cards(root)
    chosen, why = _of_one_kind(cards, [_pci(f"{root}/bus/pci/devices/{gpu.lower()[-12:]}") for gpu in gpus])
    if len(chosen) < len(cards):
        left = ", ".join(str(card) for card in cards if card not in chosen)
        found["NCCL_IB_HCA"] = ["=" + ",".join(card.name for card in chosen), f"{why}; left out: {left}"]
    own = _addresses(root) if own is None else own
    ways = {name: at for name, at in own.items() if not name.startswith(_NO_WAY_OUT)}
    if (way := next((name for name, at in ways.items() if at == address), None)) is not None:
        if cards and len(ways) > 1:  # without cards this would be the one for data too
            others = ", ".join(name for name in ways if name != way)
            found["NCCL_SOCKET_IFNAME"] = ["=" + way, f"ssh has come over it; {others} may lead elsewhere"]
        found["GLOO_SOCKET_IFNAME"] = [way, "Gloo takes the address of the host's name, which may be 127.0.1.1"]
    return found


def explain(labels: Sequence[str], reports: Mapping[int, Mapping[str, Any]], given: Mapping[str, str]) -> list[str]:
    """Lines of a table: what is set on which hosts and why, and what the user has set. None where nothing is."""
    rows: dict[tuple[str, str], list[str]] = {}
    for number, report in sorted(reports.items()):
        for name, (value, why) in report.get("nccl", {}).items():
            rows.setdefault((f"{name}={value}", why), []).append(labels[number])
    shown = [
        (words, "all hosts" if len(on) == len(labels) else ", ".join(on), why) for (words, why), on in rows.items()
    ]
    known = [(name, value) for name, value in given.items() if name in MEANING or name.startswith(("NCCL_", "GLOO_"))]
    shown += [(f"{name}={value}", "as given", MEANING.get(name, "")) for name, value in known]
    widths = [max(map(len, column)) for column in zip(*shown)][:2]  # noqa: B905 (Python 3.8 knows no `strict`)
    return [f"  {words.ljust(widths[0])}  {on.ljust(widths[1])}  {why}".rstrip() for words, on, why in shown]


def _of_one_kind(cards: Sequence[_Card], gpus: Sequence[list[str]]) -> tuple[list[_Card], str]:
    """Return the cards for training: those that share a PCIe switch with a GPU, where every GPU has one; and of
    these, or of all, those of the fastest kind. Cards of different kinds do not reach each other."""
    near = [[card for card in cards if _share_switch(card.path, gpu)] for gpu in gpus]
    beside = [card for card in cards if any(card in some for some in near)] if all(near) else list(cards)
    best = max(beside, key=lambda card: (card.rate, card.layer == "InfiniBand"), default=None)
    chosen = [card for card in beside if best and (card.layer, card.rate) == (best.layer, best.rate)]
    return chosen, "beside the GPUs" if len(chosen) == len(beside) else "the fastest kind"


def _cards(root: str) -> list[_Card]:
    """InfiniBand and RoCE cards with a port that is up."""
    found = []
    for device in sorted(glob.glob(f"{root}/class/infiniband/*"), key=lambda path: (len(path), path)):
        for port in sorted(glob.glob(f"{device}/ports/*")):
            if "ACTIVE" in _read(f"{port}/state"):
                rate = float((_read(f"{port}/rate").split() or ["0"])[0])
                path = _pci(f"{device}/device")
                found.append(_Card(os.path.basename(device), _read(f"{port}/link_layer"), rate, path))
                break
    return found


def _pci(device: str) -> list[str]:
    """Return the way to a device from its root complex: `pci0000:15`, a port of that, then switches."""
    parts = os.path.realpath(device).split("/")
    roots = [i for i, part in enumerate(parts) if part.startswith("pci") and ":" in part]
    return parts[roots[0] :] if roots else []


def _share_switch(one: Sequence[str], other: Sequence[str]) -> bool:
    """Behind one port of a root complex there are several devices only where a switch is."""
    return len(one) > 2 and len(other) > 2 and one[:2] == other[:2]


def _addresses(root: str) -> dict[str, str]:
    """IPv4 addresses by interface."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for path in sorted(glob.glob(f"{root}/class/net/*")):
            name = os.path.basename(path)
            with suppress(OSError):
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def _read(path: str) -> str:
    with suppress(OSError), open(path) as file:
        return file.read().strip()
    return ""
