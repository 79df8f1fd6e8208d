from __future__ import annotations

import os
from pathlib import Path

import pytest

from longtake.data.loading import loader
from longtake.data.loading.loader import machine_bytes


def test_a_container_has_what_it_is_given_and_no_more_than_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for text, expected in (("1000000000\n", 1_000_000_000), ("max\n", whole), (str(whole * 9), whole)):
        (tmp_path / "memory.max").write_text(text)
        monkeypatch.setattr(loader, "_CGROUP_LIMITS", (str(tmp_path / "memory.max"), str(tmp_path / "absent")))
        assert machine_bytes() == expected
