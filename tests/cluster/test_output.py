from __future__ import annotations

import io
import re
from pathlib import Path

import pytest

from longtake.cluster import launch
from longtake.cluster.output import Output

TORCHRUN = """\
rank 1 says
why
E1120 19:23:07.917000 25084 site-packages/torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: -9) x
Traceback (most recent call last):
  File "torch/distributed/run.py", line 1032, in <module>
    main()
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\x20
============================================================
longtake FAILED
------------------------------------------------------------
Failures:
[0]:
  time      : 2026-11-20_19:23:08
  host      : node2
  rank      : 9 (local_rank: 1)
  exitcode  : 2 (pid: 25103)
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-20_19:23:07
  host      : node2
  rank      : 8 (local_rank: 0)
  exitcode  : -9 (pid: 25102) (SIGKILL)
============================================================
"""


@pytest.fixture
def streams() -> tuple[io.BytesIO, io.BytesIO]:
    return io.BytesIO(), io.BytesIO()


@pytest.fixture
def output(streams: tuple[io.BytesIO, io.BytesIO]) -> Output:
    return Output(["a", "b:22"], *streams)


def test_every_line_carries_its_host_and_keeps_its_stream(output: Output, streams: tuple[io.BytesIO, io.BytesIO]):
    output.write(0, "O", b"one\ntw")
    output.write(1, "O", b"other\n")
    output.write(0, "E", b"wrong\n")
    output.write(0, "O", b"o\nthree")
    output.flush(0)
    assert streams[0].getvalue() == b"[a] one\n[b:22] other\n[a] two\n[a] three\n"
    assert streams[1].getvalue() == b"[a] wrong\n"


def test_bytes_that_are_no_text_pass_unchanged(output: Output, streams: tuple[io.BytesIO, io.BytesIO]):
    output.write(0, "O", b"\xff\xfe caf\xe9\r\n")
    assert streams[0].getvalue() == b"[a] \xff\xfe caf\xe9\r\n"
    assert output.last_words(0) == ["\ufffd\ufffd caf\ufffd"]


def test_a_line_without_end_takes_no_endless_memory(output: Output, streams: tuple[io.BytesIO, io.BytesIO]):
    for _ in range(20):
        output.write(0, "O", b"x" * 10_000)
    assert len(streams[0].getvalue()) > 190_000


def test_torchruns_report_tells_the_rank_that_failed_first(output: Output):
    output.write(1, "E", TORCHRUN.encode())
    assert output.failed_rank(1) == (8, -9)
    assert output.failed_rank(0) is None
    assert output.last_words(1) == ["rank 1 says", "why"]


def test_torchruns_own_traceback_is_left_out_and_a_programs_is_not(
    output: Output, streams: tuple[io.BytesIO, io.BytesIO]
):
    ours = b'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\nValueError: no\n'
    output.write(0, "E", ours)
    output.write(1, "E", TORCHRUN.encode())
    output.write(1, "E", b"Traceback (most recent call last):\n  cut off")
    output.flush(1)
    said = streams[1].getvalue().decode()
    assert "[a] ValueError: no\n" in said
    assert "ChildFailedError" not in said
    assert "run.py" not in said
    assert "failed (exitcode" not in said
    assert "Root Cause" not in said  # the launch says which rank failed
    assert said.endswith("[b:22] Traceback (most recent call last):\n[b:22]   cut off\n")


def test_mistake_of_several_hosts_is_shown_once_and_in_whole(
    output: Output, streams: tuple[io.BytesIO, io.BytesIO]
) -> None:
    lines = ["x.py: has 2 errors", "  lr: must be above 0", "  seed: must be a number; write --seed 1"]
    text = "\n".join(lines)
    output.write(0, "E", f"longtake: {text}\nlongtake: another\n".encode())
    output.write(1, "E", f"longtake (rank 8): {text}\nlongtake (rank 8): its own\n".encode())
    shown = streams[1].getvalue().decode().splitlines()
    assert shown == [f"[a] longtake: {lines[0]}", *(f"[a] {line}" for line in lines[1:]), *shown[3:]]
    assert shown[3:] == ["[a] longtake: another", "[b:22] longtake (rank 8): its own"]
    assert output.last_words(1)[0] == f"longtake (rank 8): {lines[0]}"


def test_a_closed_stdout_is_noticed(output: Output, streams: tuple[io.BytesIO, io.BytesIO]):
    streams[0].close()
    output.write(0, "O", b"nobody listens\n")
    assert output.closed


def test_a_lost_peer_says_what_the_launcher_looks_for():
    world = (Path(launch.__file__).parents[1] / "parallel" / "world.py").read_text(encoding="utf-8")
    said = re.sub(r'"\s*f?"', "", world)
    assert launch.LOST_PEER in said
