from __future__ import annotations

from pathlib import Path

import pytest

from longtake.cluster import Host, read_hosts
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
