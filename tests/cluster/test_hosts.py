from __future__ import annotations

from pathlib import Path

import pytest

from longtake.cluster.arguments import Host, read_hosts
from longtake.contracts import UserError

FILE = """
# training nodes
node1 slots=8
me@node2:2222 slots=4 max_slots=8   # a slow one

10.0.0.7
[fe80::1%eth0]:22
"""


def hosts(tmp_path: Path, text: str = FILE) -> Path:
    (tmp_path / "hosts").write_text(text, encoding="utf-8")
    return tmp_path / "hosts"


def test_a_host_file_may_be_deepspeeds_open_mpis_or_plain_lines(tmp_path: Path):
    assert read_hosts(hosts(tmp_path), None) == [
        Host("node1", slots=8),
        Host("node2", "me", 2222, 4),
        Host("10.0.0.7"),
        Host("fe80::1%eth0", port=22),
    ]


def test_a_mark_that_editors_write_in_front_is_no_part_of_a_name(tmp_path: Path):
    assert read_hosts(hosts(tmp_path, "\ufeffnode1\r\nnode2 slots=2\r\n"), None) == [
        Host("node1"),
        Host("node2", slots=2),
    ]


def test_hosts_may_be_listed_on_the_command_line():
    assert read_hosts(None, "a,me@b:22") == [Host("a"), Host("b", "me", 22)]


def test_hosts_are_chosen_by_label(tmp_path: Path):
    file = hosts(tmp_path)
    assert [host.label for host in read_hosts(file, None, include="10.0.0.7, node1")] == ["node1", "10.0.0.7"]
    assert [host.label for host in read_hosts(file, None, exclude="node2:2222")] == [
        "node1",
        "10.0.0.7",
        "fe80::1%eth0:22",
    ]
    with pytest.raises(UserError, match=r"--exclude node9: not among the hosts; choose from .*node1"):
        read_hosts(file, None, exclude="node9")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a\nb\na slots=2\n", "a: is there twice"),
        ("me@a\nyou@a\n", "a: is there twice"),
        ("a gpus=8\n", r"hosts:1: found 'gpus=8' behind a"),
        ("a slots=many\n", "slots=many"),
        ("a slots=0\n", "slots=0"),
        ("-oProxyCommand=evil\n", "is no host"),
        ("a:port\n", "'a:port' is no host"),
        ("# nobody\n", "names no host"),
    ],
)
def test_a_mistake_in_a_host_file_is_named(tmp_path: Path, text: str, said: str):
    with pytest.raises(UserError, match=said):
        read_hosts(hosts(tmp_path, text), None)


def test_hosts_come_from_one_place(tmp_path: Path):
    for file, listed in ((None, None), (hosts(tmp_path), "a")):
        with pytest.raises(UserError, match="either --hostfile FILE or --host"):
            read_hosts(file, listed)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("node1:8", [Host("node1", slots=8)]),
        ("node1:22", [Host("node1", port=22)]),
        ("node1:2222", [Host("node1", port=2222)]),
        ("me@node1:8", [Host("node1", "me", slots=8)]),
        ("node1:8 slots=8", [Host("node1", slots=8)]),
        ("node1,node2", [Host("node1"), Host("node2")]),
        ("node1:4, node2:4", [Host("node1", slots=4), Host("node2", slots=4)]),
        ("node1 slots=8 max-slots=8", [Host("node1", slots=8)]),
        ("node1 slots=8 max_slots=16", [Host("node1", slots=8)]),
        ("node1 slots = 8", [Host("node1", slots=8)]),
        ("node1 cpus=4 username=me", [Host("node1", "me", slots=4)]),
    ],
)
def test_host_file_of_mpi_programs_is_read_as_they_mean_it(line: str, expected: list[Host], tmp_path: Path):
    assert read_hosts(hosts(tmp_path, line + "\n"), None) == expected


def test_host_list_with_numbers_of_processes_is_read():
    assert read_hosts(None, "node1:8,node2:4") == [Host("node1", slots=8), Host("node2", slots=4)]


@pytest.mark.parametrize(
    "line",
    [
        "node1:8 slots=4",
        "node1 slots=8 max-slots=4",
        "node1:8:8",
        "node[1-4]",
        "+n0",
        "^node1",
        "node1 node2",
        "node1 binding=user",
        "node1:99999",
        "node1 slots=99999999999999999999",
        "rank 0=node1 slot=1",
        "node1:" + "9" * 5000,
    ],
)
def test_host_file_line_with_another_meaning_is_refused_with_its_number(line: str, tmp_path: Path):
    with pytest.raises(UserError, match=r"hosts:2: "):
        read_hosts(hosts(tmp_path, "good\n" + line + "\n"), None)
