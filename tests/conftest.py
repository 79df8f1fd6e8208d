"""What the tests cost, printed at the end so that budgets are seen, and in which order several workers take them."""

from __future__ import annotations

import gc
import json
import os
import signal
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests import forks

# Else a second and more of a processor goes, each time code is compiled, into processes for kernels of a GPU.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
settings.register_profile("any machine", deadline=None)  # how long an example takes says how busy the machine is
settings.load_profile("any machine")

OF_TERMINALS = (
    *("COLUMNS", "LINES", "TERMINAL_WIDTH", "FORCE_COLOR", "NO_COLOR", "PY_COLORS", "CLICOLOR", "CLICOLOR_FORCE"),
    *("TTY_COMPATIBLE", "TTY_INTERACTIVE", "CI", "GITHUB_ACTIONS"),
)
_FREEZE, _UNFREEZE = gc.freeze, gc.unfreeze
SHOWN = 8  # files and tests, dearest first
# Files with worlds of more than two processes: one worker takes them all, or two cores would have eight ranks and more.
WORLDS = (
    "parallel/test_law_of_meshes.py",
    "parallel/test_bucket_sequence.py",
    "parallel/test_runs.py",
    "parallel/test_mesh.py",
    "train/test_worlds.py",
    "train/optimizer/test_meshes.py",
    "checkpoint/test_across_ranks.py",
    "system/test_shared_captions.py",
)
# Files of more than a quarter of a minute: begun first, so that no worker has one left when the other is done.
DEAR = (
    *WORLDS,
    "train/test_kills.py",
    "train/test_latents.py",
    "system/test_lora.py",
    "scripts/test_diffusion.py",
    "train/test_run_file.py",
    "train/test_saving.py",
    "train/test_resume.py",
    "train/test_data.py",
    "demo/test_run.py",
    "plan/test_memory.py",
    "pretended/test_devices.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", metavar="FILE", type=Path, help="writes every test's processor and wall seconds there")


def pytest_sessionstart() -> None:
    """What a terminal or a CI system says of itself would colour and break the lines that tests read. A shell's job in
    the background ignores Ctrl-C, and so would all that tests start and interrupt."""
    for name in OF_TERMINALS:
        os.environ.pop(name, None)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """All that is there, half a million objects, is set aside for good: a collection takes 0.3 s with them.

    Runs of training begin and end with one, and would give back at their end what was set aside before them.
    """
    _set_aside()


def pytest_unconfigure() -> None:
    _give_back()  # libraries complain of what the interpreter's end does not collect


def _set_aside() -> None:
    _FREEZE()
    gc.freeze = gc.unfreeze = lambda: None


def _give_back() -> None:
    gc.freeze, gc.unfreeze = _FREEZE, _UNFREEZE
    gc.unfreeze()


@pytest.fixture
def fresh_wandb() -> None:
    """W&B that reads its settings again: it keeps those of the first call in a process, whichever test made it."""
    pytest.importorskip("wandb").teardown()


@pytest.fixture(autouse=True, scope="module")
def what_stays() -> Iterator[None]:
    """Sets aside what a file's tests leave alive, such as modules, for good: after the imports of a few files, each
    collection at a run's start and end took as long as three of its steps."""
    yield
    gc.collect()
    _FREEZE()


@pytest.fixture
def own_collector() -> Iterator[None]:
    """The garbage collector as the code under test finds it outside of tests."""
    _give_back()
    yield
    _set_aside()


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """No graphs of earlier tests, and none for later ones, with the compiler's limits as they were."""
    import torch._dynamo

    config = torch._dynamo.config
    limits = {name: getattr(config, name) for name in ("recompile_limit", "accumulated_recompile_limit")}
    torch.compiler.reset()
    with config.patch(limits):
        yield
    torch.compiler.reset()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Costs(config))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: DEAR.index(file) if (file := _file(item.nodeid)) in DEAR else len(DEAR))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadfile` in the order of `DEAR`, with all of `WORLDS` as if they were one file."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "worlds" if (file := _file(nodeid)) in WORLDS else file

    if config.getoption("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False
    return Scheduling(config, log)


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0].removeprefix("tests/")


def spent() -> float:
    """Seconds of processor time of this process, of its children that have ended, and of its fork server's."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system + forks.processor_seconds()


class Costs:
    """Processor and wall seconds of each test. A fixture's count for the test that asked for it first."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.before = config, spent()
        self.tests: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def pytest_collection_finish(self) -> None:
        self.before = spent()  # imports are no test's

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now = spent()
        report.processor_seconds, self.before = now - self.before, now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        cost = self.tests[report.nodeid]
        cost[0] += report.processor_seconds
        cost[1] += report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Under xdist this is the process that gathers the reports of all."""
        if (target := self.config.getoption("costs")) is not None:
            target.write_text(json.dumps(self.tests, indent=1), encoding="utf-8")
        files: dict[str, float] = defaultdict(float)
        for name, (processor, _) in self.tests.items():
            files[name.partition("::")[0]] += processor
        terminalreporter.section(f"{sum(files.values()):.0f} s of processor time in tests")
        for costs in (files, {name: processor for name, (processor, _) in self.tests.items()}):
            dearest = sorted(costs.items(), key=lambda item: -item[1])[:SHOWN]
            for name, processor in dearest:
                if processor >= 1:
                    terminalreporter.write_line(f"{processor:6.1f} s {name}")
