"""The files of a table on a local Ray cluster: the table is that of one process, row for row."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from longtake.data.clips.video import write_image, write_video
from longtake.data.probing.pool import ask_on_ray
from longtake.data.probing.probe import probe_table
from tests.data.made_clips import noise_frames

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),  # starting a cluster takes a minute on a busy machine
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Two processes on this machine; their search path is that of the tests."""
    import ray  # a second of every session that collects this file

    here = str(Path(__file__).parents[3])
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": here, "OMP_NUM_THREADS": "1"}},
    )
    yield
    ray.shutdown()


@pytest.fixture
def clips(tmp_path: Path) -> Path:
    """A table of 600 rows over a few files, some of them bad."""
    for number in range(3):
        write_video(tmp_path / f"{number}.mp4", noise_frames(5 + number, 32, 48), 24)
    write_image(tmp_path / "ü b.png", noise_frames(1, 20, 30)[0])
    (tmp_path / "empty.mp4").touch()
    names = ["0.mp4", "ü b.png", "gone.mp4", "1.mp4", "empty.mp4", "2.mp4"]
    (tmp_path / "clips.csv").write_text("path,text\n" + "".join(f"{name},cat {name}\n" for name in names * 100))
    return tmp_path / "clips.csv"


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("decode_check", [False, True])
def test_a_cluster_finds_what_one_process_finds(decode_check: bool, clips: Path) -> None:
    alone = probe_table(clips, clips.with_name("alone.parquet"), decode_check=decode_check)
    calls: list[tuple[int, int]] = []
    spread = probe_table(
        clips,
        clips.with_name("spread.parquet"),
        decode_check=decode_check,
        engine="ray",
        workers=2,
        progress=lambda *call: calls.append(call),
    )
    assert spread.bad_rows == alone.bad_rows
    assert clips.with_name("spread.parquet").read_bytes() == clips.with_name("alone.parquet").read_bytes()
    assert calls[0] == (0, 600)
    assert calls[-1] == (600, 600)
    parts = [
        probe_table(clips, clips.with_name("part.jsonl"), engine="ray", workers=1, part=(number, 2))
        for number in (1, 2)
    ]
    whole = probe_table(clips, clips.with_name("whole.jsonl"))
    assert b"".join(part.target.read_bytes() for part in parts) == whole.target.read_bytes()


def _crash_on_three(argument: str) -> str:
    if argument == "3":
        os.abort()
    return argument * 2


@pytest.mark.usefixtures("cluster")
def test_a_crash_costs_its_file_and_no_other() -> None:
    arguments = [str(number % 50) for number in range(300)]
    answers = dict(ask_on_ray(_crash_on_three, 1, arguments))
    assert sorted(answers) == list(range(300))
    for place, argument in enumerate(arguments):
        crashed = "reading it crashed the decoder (killed by SIGABRT)"
        assert answers[place] == (crashed if argument == "3" else argument * 2)


@pytest.mark.usefixtures("cluster")
def test_no_files_need_no_cluster() -> None:
    assert list(ask_on_ray(_crash_on_three, 1, [])) == []
