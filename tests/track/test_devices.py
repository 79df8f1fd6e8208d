from __future__ import annotations

import re

import pytest

from longtake.contracts import UserError
from longtake.track import GPUS, gpu_named, peak_flops


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
    ],
)
def test_chips_of_like_names_are_told_apart(name: str, found: str):
    assert gpu_named(name).name == found


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
