"""NCCL's variables, derived from trees of sysfs as machines have them."""

from __future__ import annotations

from pathlib import Path

import pytest

from longtake.cluster.nccl import derive, explain

GPUS = [f"00000000:{0x10 + i:02X}:00.0" for i in range(8)]  # as nvidia-smi writes them


def device(root: Path, address: str, port: int, switch: bool = True) -> Path:
    """A PCI device behind a port of a root complex of its own, or behind a switch there."""
    way = root / "devices" / f"pci0000:{port:02x}" / f"0000:{port:02x}:01.0"
    place = (way / f"0000:{port:02x}:02.0" if switch else way) / address
    place.mkdir(parents=True)
    listed = root / "bus" / "pci" / "devices"
    listed.mkdir(parents=True, exist_ok=True)
    (listed / address).symlink_to(place)
    return place


def card(root: Path, name: str, port: int, layer: str, rate: str, state: str = "4: ACTIVE") -> None:
    place = device(root, f"0000:{port:02x}:{len(name)}{name[-1]}.0", port)
    folder = root / "class" / "infiniband" / name
    (folder / "ports" / "1").mkdir(parents=True)
    (folder / "device").symlink_to(place)
    for file, text in (("state", state), ("link_layer", layer), ("rate", rate)):
        (folder / "ports" / "1" / file).write_text(text + "\n")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Eight GPUs, each behind a switch of its own."""
    for i, gpu in enumerate(GPUS):
        device(tmp_path, gpu.lower()[-12:], 0x40 + i)
    return tmp_path


def derived(root: Path, own: dict[str, str] | None = None, address: str = "10.0.0.7") -> dict[str, str]:
    own = {"lo": "127.0.0.1", "docker0": "172.17.0.1", "eno1": "10.0.0.7"} if own is None else own
    return {name: value for name, (value, _) in derive(GPUS, address, str(root), own).items()}


EVERYWHERE = {"NCCL_DEBUG": "WARN", "GLOO_SOCKET_IFNAME": "eno1"}


@pytest.mark.parametrize(
    ("layer", "rate"), [("Ethernet", "100 Gb/sec (4X EDR)"), ("InfiniBand", "400 Gb/sec (4X NDR)")]
)
def test_of_eight_cards_and_one_for_storage_the_eight_are_named(machine: Path, layer: str, rate: str) -> None:
    card(machine, "mlx5_0", 0x30, layer, rate)  # on no GPU's switch
    for i in range(8):
        card(machine, f"mlx5_{i + 1}", 0x40 + i, "InfiniBand", "400 Gb/sec (4X NDR)")
    names = ",".join(f"mlx5_{i}" for i in range(1, 9))
    assert derived(machine) == EVERYWHERE | {"NCCL_IB_HCA": f"={names}"}  # as Lambda's tutorial has it
    why = derive(GPUS, "", str(machine), {})["NCCL_IB_HCA"][1]
    assert why == f"beside the GPUs; left out: mlx5_0 ({layer}, {rate.split()[0]} Gb/s)"


def test_cards_of_one_kind_beside_the_gpus_are_found_by_nccl(machine: Path) -> None:
    for i in range(8):
        card(machine, f"mlx5_{i}", 0x40 + i, "InfiniBand", "400 Gb/sec (4X NDR)")
    card(machine, "mlx5_8", 0x30, "Ethernet", "100 Gb/sec", state="1: DOWN")
    assert derived(machine) == EVERYWHERE


def test_where_a_cloud_hides_the_tree_the_fastest_kind_counts(tmp_path: Path) -> None:
    for i, gpu in enumerate(GPUS):
        device(tmp_path, gpu.lower()[-12:], 0x40 + i, switch=False)
    for i in range(4):
        card(tmp_path, f"mlx5_{i}", 0x20 + i, "InfiniBand", "200 Gb/sec")
    card(tmp_path, "mlx5_4", 0x30, "Ethernet", "200 Gb/sec")
    card(tmp_path, "mlx5_5", 0x31, "InfiniBand", "100 Gb/sec")
    assert derived(tmp_path)["NCCL_IB_HCA"] == "=mlx5_0,mlx5_1,mlx5_2,mlx5_3"


def test_roce_needs_no_more_than_infiniband(machine: Path) -> None:
    for i in range(8):
        card(machine, f"mlx5_{i}", 0x40 + i, "Ethernet", "400 Gb/sec (4X NDR)")
    assert derived(machine) == EVERYWHERE


def test_of_several_interfaces_the_one_that_ssh_came_over_is_named_unless_data_would_take_it(machine: Path) -> None:
    own = {"eno1": "10.0.0.7", "ens9": "192.168.0.7", "lo": "127.0.0.1"}
    assert derived(machine, own) == EVERYWHERE
    card(machine, "mlx5_0", 0x30, "InfiniBand", "400 Gb/sec (4X NDR)")
    assert derived(machine, own) == EVERYWHERE | {"NCCL_SOCKET_IFNAME": "=eno1"}
    assert derived(machine, own, address="203.0.113.9") == {"NCCL_DEBUG": "WARN"}  # behind a translation


def test_without_cards_or_gpus_little_is_set(machine: Path) -> None:
    assert derived(machine) == EVERYWHERE
    assert derive([], "10.0.0.7", str(machine)) == {}


def test_the_table_says_what_is_set_where_and_what_was_given() -> None:
    reports = {
        0: {"nccl": {"NCCL_DEBUG": ["WARN", "because"], "NCCL_IB_HCA": ["=a", "left out: b"]}},
        1: {"nccl": {"NCCL_DEBUG": ["WARN", "because"]}},
    }
    given = {"NCCL_P2P_LEVEL": "NVL", "HF_HOME": "/hf", "NCCL_NEW": "1"}
    rows = explain(["n1", "n2"], reports, given)
    assert rows[:2] == [
        "  NCCL_DEBUG=WARN     all hosts  because",
        "  NCCL_IB_HCA==a      n1         left out: b",
    ]
    assert rows[2].startswith("  NCCL_P2P_LEVEL=NVL  as given   how near GPUs")
    assert rows[3:] == ["  NCCL_NEW=1          as given"]
    assert explain(["n1"], {0: {}}, {}) == []
