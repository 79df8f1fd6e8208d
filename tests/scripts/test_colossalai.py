"""`colossalai run` as Open-Sora's and Lambda's pages write it, with `scripts/bin` on the path."""

from __future__ import annotations

import os
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from longtake.cluster.launch import Launch, Launcher
from tests.cluster.servers import ROOT

SCRIPT = ROOT / "scripts" / "bin" / "colossalai"
LAMBDA = r"""NCCL_P2P_LEVEL=NVL NCCL_NET_GDR_LEVEL=PIX \
NCCL_IB_HCA==mlx5_1,mlx5_2,mlx5_3,mlx5_4,mlx5_5,mlx5_6,mlx5_7,mlx5_8 \
NCCL_IB_PCI_RELAXED_ORDERING=1 NCCL_SOCKET_IFNAME=eno1 NCCL_DEBUG=WARN TORCH_NCCL_ASYNC_ERROR_HANDLING=1 \
TORCH_NCCL_ENABLE_MONITORING=1 \
TOKENIZERS_PARALLELISM=false \
OMP_NUM_THREADS=16 \
colossalai run --nproc_per_node 8 \
--hostfile nodes.txt \
scripts/train.py configs/opensora-v1-2/lambda/stage1.py \
--data-path OpenVid1M.csv \
--ckpt-path pretrained_models/PixArt-Sigma-XL-2-2K-MS.pth"""
OPEN_SORA = r"""colossalai run --hostfile nodes.txt --nproc_per_node 8 scripts/diffusion/train.py \
configs/diffusion/train/image.py --dataset.data-path datasets/pexels_45k_necessary.csv"""


@pytest.fixture
def launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Launches are noted in place of being started, in a folder with a file of three hosts."""
    found: list[Launch] = []
    monkeypatch.setattr(Launcher, "run", lambda self: found.append(self.launch) or 0)
    monkeypatch.chdir(tmp_path)
    Path("nodes.txt").write_text("node-001\nnode-002\nnode-003\n")
    return found


def written(line: str) -> list[str]:
    """The words that a shell makes of it."""
    return shlex.split(line.replace("\\\n", ""))


def say(line: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Runs a line as a shell would; the exit status."""
    words = written(line)
    program = words.index("colossalai")
    for word in words[:program]:
        monkeypatch.setenv(*word.split("=", 1))
    monkeypatch.setattr(sys, "argv", words[program:])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return ended.value.code


@pytest.mark.parametrize("line", [LAMBDA, OPEN_SORA], ids=["Lambda", "Open-Sora"])
def test_a_pages_command_launches_its_script_on_all_nodes(
    line: str, launches: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert os.access(SCRIPT, os.X_OK)
    assert say(line, monkeypatch) == 0
    (launch,) = launches
    assert [host.label for host in launch.hosts] == ["node-001", "node-002", "node-003"]
    assert launch.processes == 8
    words = written(line)
    script = next(i for i, word in enumerate(words) if word.endswith("train.py"))
    assert launch.words == words[script:]
    variables = dict(word.split("=", 1) for word in words[: words.index("colossalai")])
    assert variables.items() <= launch.environment.items()
    if line is LAMBDA:
        assert launch.environment["NCCL_IB_HCA"].startswith("=mlx5_1,")


def test_every_other_flag_acts(launches: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    flags = "--exclude node-001 --num_nodes 1 --master_addr 10.0.0.1 --master_port 29501 --ssh-port 2222"
    line = (
        f"colossalai run --hostfile nodes.txt {flags} --extra_launch_args max_restarts=3,no_python -m longtake train x"
    )
    assert say(line, monkeypatch) == 0
    (launch,) = launches
    assert [host.label for host in launch.hosts] == ["node-002"]
    assert (launch.master_address, launch.master_port, list(launch.ssh)) == ("10.0.0.1", 29501, ["ssh", "-p", "2222"])
    assert launch.torchrun == ["--max_restarts=3", "--no_python"]
    assert launch.words == ["train", "x"]
    assert say("colossalai run -H a,b --include b scripts/train.py c.py", monkeypatch) == 0
    assert [host.label for host in launches[1].hosts] == ["b"]


def test_one_machine_needs_no_ssh(launches: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    here: list[object] = []
    monkeypatch.setattr("longtake.cluster.here.launch_here", lambda *words: here.append(words[:2]) or 0)
    line = "colossalai run --nproc_per_node 8 --master_port 29501 scripts/diffusion/train.py c.py --lr 1"
    assert say(line, monkeypatch) == 0
    assert here == [(["scripts/diffusion/train.py", "c.py", "--lr", "1"], 8)]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("colossalai check -i", "found check; `colossalai run` alone is known here"),
        ("colossalai run --hostfile nodes.txt -m torch.x y", "no module but longtake is launched"),
        ("colossalai run --nproc_per_node 8 train", "found train in the place of a script"),
        ("colossalai run --num_nodes 2 train.py", "--num_nodes: is for several hosts"),
        ("colossalai run --hostfile gone --num_nodes 2 train.py", "gone: No such file or directory"),
    ],
)
def test_what_has_no_counterpart_is_refused(
    line: str,
    said: str,
    launches: list[Launch],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert say(line, monkeypatch) == 2
    assert said in capsys.readouterr().err
    assert not launches
