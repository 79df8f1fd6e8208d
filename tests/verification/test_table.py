"""The table of verified presets in docs/verify.md is what the records say, and every family can be verified."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from longtake.contracts import UserError
from longtake.families import registry
from longtake.verification.report import PartResult, TrainingResult, Verification, read_verified, verified_table
from tests.pretended.steps import MODES, RELEASED
from tests.verification.releases import RELEASES
from tools.verified_table import BEGIN, PAGE, RECORDS, with_table

RECORD = Verification(
    preset="cogvideox_fun/lora_2b",
    family="cogvideox",
    date="2026-01-01",
    device="NVIDIA H100 80GB HBM3",
    device_gib=79.1,
    versions={},
    parts=(
        PartResult("denoiser", "owner/name", output_error=2e-6, gradient_error=3e-5),
        PartResult("t5", "owner/name", output_error=4e-6),
    ),
    training=TrainingResult(
        steps=50, step_seconds=1.25, forecast_seconds=1.5, peak_bytes=3 * 2**30, forecast_bytes=4 * 2**30
    ),
)


def test_page_holds_the_table_of_the_records() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page.count(BEGIN) == 1
    assert with_table(page, RECORDS) == page


def test_table_has_a_line_for_each_record(tmp_path: Path) -> None:
    failed = replace(RECORD, preset="b", parts=(PartResult("denoiser", "none", problem="differs"),))
    for number, record in enumerate((failed, RECORD)):
        (tmp_path / f"{number}.json").write_text(record.to_json())
    records = read_verified(tmp_path)
    assert [record["preset"] for record in records] == ["b", "cogvideox_fun/lora_2b"]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in verified_table(records).splitlines()]
    assert lines[2][2:5] == ["no", "no class", "no class"]
    assert lines[3] == [RECORD.preset, RECORD.device, "yes", "4e-06", "3e-05", "50", "1.25, 1.5", "3, 4"]
    page = f"before\n{BEGIN}stale\n<!-- verified: end -->\nafter\n"
    written = with_table(page, tmp_path)
    assert written.startswith(f"before\n{BEGIN}| preset")
    assert "stale" not in written
    assert written.endswith("<!-- verified: end -->\nafter\n")


def test_empty_folder_gives_one_line(tmp_path: Path) -> None:
    assert len(verified_table(read_verified(tmp_path)).splitlines()) == 1


@pytest.mark.parametrize("text", ["{}", "[", json.dumps({**json.loads(RECORD.to_json()), "format": 99})])
def test_file_that_is_no_record_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UserError, match=r"x\.json"):
        read_verified(tmp_path)


def test_every_family_has_a_tiny_release_and_modes_on_the_fake_device() -> None:
    ours = {family.name for family in registry._OURS}
    assert ours <= RELEASES.keys()
    assert {name.partition(" ")[0] for name in MODES} == ours
    assert {release.partition("_ti2v")[0] for release, _ in RELEASED.values()} == ours
