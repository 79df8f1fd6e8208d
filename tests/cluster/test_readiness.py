from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from longtake.cluster import host, readiness

GPUS = [[0, "GPU-aa"], [1, "GPU-bb"], [2, "GPU-cc"]]


def report(**changes: Any) -> dict[str, Any]:
    whole = {"python": [3, 12, 1], "longtake": "1", "code": "c0", "torch": "2.11", "same": [], "folders": []}
    return whole | {"gpus": GPUS, "programs": []} | changes


def program(gpu: int | None, pid: int = 4) -> dict[str, Any]:
    return {"gpu": gpu, "pid": str(pid), "memory": "70000 MiB", "program": "python"}


def test_a_host_that_has_all_is_ready():
    assert readiness.lacks(report(), "/work") is None
    assert readiness.differs(report(), report(), "a") is None
    assert readiness.busy(report(), [0, 1]) is None
    assert readiness.same_run(report(), "x") is None


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"workdir": "No such file or directory"}, "working directory /work: No such file or directory"),
        ({"probe": "OSError: broken"}, "OSError: broken"),
        ({"python": [3, 9, 2]}, "Python 3.9.2 found, 3.11 or later"),
        ({"python": [3, 11, 2]}, "no longtake and no torch"),
        ({"python": [3, 11, 2], "longtake": "1"}, "has no torch"),
    ],
)
def test_what_a_host_lacks_is_named(found: dict[str, Any], said: str):
    assert said in readiness.lacks(found, "/work")


def test_software_that_differs_from_the_first_hosts_is_named():
    assert readiness.differs(report(torch="2.12"), report(), "a") == "torch 2.12 found, a has 2.11"
    assert "others than on a" in readiness.differs(report(code="c1"), report(), "a")


def test_host_with_other_code_than_the_launcher_is_named() -> None:
    here = readiness.installed_here()
    same = report(longtake=here["longtake"], code=here["code"])
    assert readiness.other_code(same, here) is None
    for other in (
        same | {"code": "c1", "root": "/opt/longtake"},
        same | {"code": "c1", "longtake": "0", "root": "/opt"},
    ):
        line = readiness.other_code(other, here)
        assert line is not None
        assert other["root"] in line
        assert here["root"] in line


def test_host_reports_the_digest_that_the_launcher_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    here = readiness.installed_here()
    monkeypatch.setenv("PYTHONPATH", str(Path(here["root"]).parent))
    probed = host._probe()
    assert {key: probed[key] for key in here} == here


def test_the_gpus_of_a_launch_are_the_first_ones_or_those_made_visible():
    assert readiness.used_gpus(report(), 2, None) == [0, 1]
    assert readiness.used_gpus(report(), 8, "2,1") == [2, 1]
    assert readiness.used_gpus(report(), 1, "GPU-c") == [2]
    assert readiness.used_gpus({"python": [3, 11]}, 2, None) is None


def test_only_programs_on_the_gpus_of_the_launch_are_in_its_way():
    found = report(programs=[program(2)])
    assert readiness.busy(found, [0, 1]) is None
    assert readiness.busy(found, [1, 2]) == "in use: GPU 2 by python (pid 4, 70000 MiB)"
    assert readiness.busy(report(programs=[program(None)]), [0]) is not None
    assert readiness.busy(report(programs=[program(0, pid) for pid in range(6)]), [0]).endswith(" and 2 more")


def test_a_run_of_the_name_is_named():
    assert readiness.same_run(report(same=[7]), "x").startswith("a run named x is there (pid 7)")
    assert readiness.same_run(report(folders=["outputs/x"]), "x") == "a run is training in outputs/x"


def test_two_names_of_one_machine_do_not_share_its_gpus():
    one, other = (report(), [0, 1]), (report(gpus=[[0, "GPU-dd"]]), [0])
    assert readiness.shared_gpus({"a": one, "b": other}) == []
    assert readiness.shared_gpus({"a": one, "b": other, "c": (report(), [1])}) == [
        ("c", "has the GPUs of a: both are names of one machine")
    ]
