from __future__ import annotations

import re

import pytest

from longtake.contracts import UserError
from longtake.track.devices import GPUS, gpu_named, peak_flops


@pytest.mark.parametrize("name", ["h200", "H200", "NVIDIA H200", "nvidia_h200"])
def test_a_gpu_is_found_by_its_short_name_and_by_its_own(name: str):
    assert gpu_named(name).name == "h200"


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("rtx 4090", "4090"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("a100-40gb", "a100-40gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("l40s", "l40s"),
        ("rtx 6000 ada", "rtx-6000-ada"),
        ("NVIDIA GeForce RTX 3090 Ti", "3090-ti"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "4070-ti-super"),
        ("NVIDIA RTX 5000 Ada Generation", "rtx-5000-ada"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
    ],
)
def test_chips_of_like_names_are_told_apart(name: str, found: str):
    assert gpu_named(name).name == found


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        *((name, "3060") for name in ("3060", "rtx3060", "RTX 3060", "geforce rtx-3060", "nvidia_3060", "3060 12GB")),
        *((name, "4090") for name in ("4090", "RTX-4090", "rtx_4090", "GeForce 4090", "4090-24gb")),
        *((name, "4070-ti") for name in ("4070 Ti", "4070ti", "rtx4070ti", "RTX 4070-TI")),
        *((name, "h100") for name in ("H100", "h100-sxm", "H100 SXM5", "h100 80GB", "h100-80gb")),
        *((name, "a6000") for name in ("a6000", "RTX A6000", "rtxa6000", "quadro rtx a6000")),
        ("4070 super", "4070-super"),
        ("rtx 3090", "3090"),
        ("a100-80gb", "a100"),
        ("a100 40GB", "a100-40gb"),
        ("tesla l4", "l4"),
        ("L40S", "l40s"),
        ("6000 ada", "rtx-6000-ada"),
        ("rtx pro 6000 blackwell", "rtx-pro-6000"),
    ],
)
def test_gpu_named_takes_names_as_people_write_them(name: str, gpu: str):
    assert gpu_named(name) == next(entry for entry in GPUS if entry.name == gpu)


def test_gpu_named_memory_in_the_name_counts():
    assert gpu_named("3080 12GB").memory_gib == 12
    assert gpu_named("RTX 4060 Ti 8GB").memory_gib == 8
    assert gpu_named("RTX 4060 Ti 8GB").name == "4060-ti"


@pytest.mark.parametrize("name", ["abacus", "NVIDIA GeForce RTX 4090 Laptop GPU", ""])
def test_an_unknown_gpu_is_refused_with_the_list(name: str):
    with pytest.raises(UserError, match=r"choose one of .*h200.*4090"):
        gpu_named(name)


def test_every_entry_is_complete_and_found_by_its_own_name():
    for gpu in GPUS:
        assert gpu_named(gpu.name) is gpu
        assert min(gpu.peak_flops, gpu.memory_gib, gpu.memory_bandwidth, gpu.link_bandwidth) > 0
        assert re.compile(gpu.pattern)
    assert peak_flops("NVIDIA A100-SXM4-40GB") == peak_flops("NVIDIA A100-SXM4-80GB")
