"""Law 2: killed at any moment and started again = never killed; stopped by a signal, a run says how to go on.

The processes that are killed or stopped are real ones; what goes on afterwards mostly runs in this process, which is
as good and saves its start.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
from pathlib import Path

import pytest

from longtake.checkpoint import writer
from longtake.checkpoint.folder import is_complete
from longtake.contracts import EXIT_INTERRUPTED
from longtake.train.health.interrupt import EXIT_NO_FIRST_STEP
from tests.train.runs import (
    assert_same_bits,
    exact,
    finish,
    kill,
    metrics,
    pausing,
    start,
    steps_saved,
    train_here,
    wait_until,
    write_config,
)

STEPS = 18
SAVED_EVERY = 3
PAUSE = 8  # steps that a run makes before it waits to be killed or stopped
SETTINGS = {"max_steps": STEPS, "ckpt_every": SAVED_EVERY}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, clips: Path) -> Path:
    """The folder of the run that nobody stops."""
    return train_here(write_config(tmp_path_factory.mktemp("undisturbed"), clips, **SETTINGS))[0].folder


@pytest.fixture
def config(tmp_path: Path, clips: Path) -> Path:
    return write_config(tmp_path, clips, **SETTINGS)


def run_folder(config: Path) -> Path:
    return config.parent / "outputs" / "tiny"


def last(folder: Path) -> Path:
    return max((path for path in folder.glob("epoch*-global_step*")), key=lambda path: int(path.name.split("step")[1]))


def assert_the_undisturbed_run(folder: Path, undisturbed: Path) -> None:
    """Every step's samples and loss, and all tensors at the end, bit by bit."""
    assert exact(folder) == exact(undisturbed)
    assert_same_bits(last(folder), last(undisturbed))


# The writer of checkpoints, which comes to no end with the file that it writes at one step.
STALLING = """
import os, runpy, sys, time

sync = os.fsync


def stalling(descriptor):
    while "global_step{step}." in os.readlink(f"/proc/self/fd/{{descriptor}}"):
        time.sleep(1)
    sync(descriptor)


os.fsync = stalling
sys.argv[0] = {writer!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def stalling(folder: Path, step: int) -> str:
    """What has a run use that writer."""
    program = folder / "stalling.py"
    program.write_text(STALLING.format(step=step, writer=writer.__file__), encoding="utf-8")
    return f"from longtake.checkpoint import writer\nwriter.__file__ = {str(program)!r}"


def killed(config: Path, moment: str, *words: str) -> Path:
    """Starts a run, kills it at `moment`, and returns its folder."""
    folder = run_folder(config)
    more = stalling(config.parent, 2 * SAVED_EVERY) if moment == "while it saves" else ""
    process = start("train", config, *words, program=pausing(config.parent, PAUSE, more))
    ready = {
        "in mid-step": lambda: (
            len(metrics(folder)) >= SAVED_EVERY + 3 and any(folder.glob(f"*-global_step{SAVED_EVERY}"))
        ),
        "while it saves": lambda: any(folder.glob(f"*-global_step{2 * SAVED_EVERY}.partial/*")),
        "between a save and the next step": lambda: any(folder.glob(f"*-global_step{2 * SAVED_EVERY}")),
    }[moment]
    wait_until(process, ready)
    kill(process)
    process.communicate()
    assert 0 < len(metrics(folder)) < STEPS
    return folder


@pytest.mark.parametrize("moment", ["in mid-step", "while it saves", "between a save and the next step"])
def test_a_killed_run_goes_on_as_the_run_that_was_never_killed(config: Path, undisturbed: Path, moment: str) -> None:
    folder = killed(config, moment)
    saved = steps_saved(folder)
    outcome, said = train_here(config, "--resume", "auto")
    assert outcome.folder == folder
    assert f"step {saved[-1]}" in said
    assert_the_undisturbed_run(folder, undisturbed)
    assert not list(folder.glob("*.partial"))


@pytest.mark.slow
def test_a_killed_run_goes_on_from_its_folder_and_with_loaders(config: Path, undisturbed: Path) -> None:
    folder = killed(config, "in mid-step", "--num-workers", "2")
    outcome, _ = train_here(folder, "--num-workers", "0")
    assert outcome.folder == folder
    assert_the_undisturbed_run(folder, undisturbed)


@pytest.mark.slow
def test_a_run_killed_before_its_first_checkpoint_begins_again_in_its_folder(
    tmp_path: Path, clips: Path, undisturbed: Path
) -> None:
    config = write_config(tmp_path, clips, max_steps=STEPS)
    folder = run_folder(config)
    process = start("train", config, program=pausing(tmp_path, PAUSE))
    wait_until(process, lambda: len(metrics(folder)) >= 2)
    kill(process)
    process.communicate()
    left = shutil.copytree(folder, tmp_path / "left")
    for words in (("outputs/tiny",), ("tiny.py", "--resume", "auto")):
        shutil.rmtree(folder)
        shutil.copytree(left, folder)
        outcome, _ = train_here(tmp_path / words[0], *words[1:])
        assert outcome.folder == folder
        assert_the_undisturbed_run(folder, undisturbed)


@pytest.mark.slow
def test_a_run_killed_twice_and_then_torchrun_with_two_processes_keep_order_and_losses(
    config: Path, undisturbed: Path
) -> None:
    folder = killed(config, "between a save and the next step")
    process = start("train", folder, processes=2, program=pausing(config.parent, PAUSE + 3 * SAVED_EVERY))
    seen = len(metrics(folder))
    wait_until(process, lambda: len(metrics(folder)) >= seen + 2 * SAVED_EVERY)
    kill(process)
    process.communicate()
    code, out, error = finish(start("train", config, "--resume", "auto", processes=2))
    assert code == 0, error
    assert "2 processes" in out
    assert f"done at step {STEPS}; checkpoint: {last(folder)}" in out
    assert "Traceback" not in error
    assert "destroy_process_group" not in error
    ours, theirs = metrics(folder), metrics(undisturbed)
    assert [line["digest"] for line in ours] == [line["digest"] for line in theirs]
    assert [line["loss"] for line in ours[: 3 * SAVED_EVERY]] == pytest.approx(
        [line["loss"] for line in theirs[: 3 * SAVED_EVERY]], rel=1e-5
    )


def stopped(
    config: Path, number: signal.Signals, *words: str, to_all: bool = False, processes: int = 0, fresh: bool = True
) -> tuple[int, str, str]:
    """Starts a run, signals it (`to_all`: its whole group, as a terminal does) after a few steps, waits for its end."""
    program = pausing(config.parent, PAUSE)
    process = start("train", config, *words, processes=processes, program=program, fresh=fresh)
    wait_until(process, lambda: len(metrics(run_folder(config))) >= SAVED_EVERY + 2)
    (os.killpg if to_all else os.kill)(process.pid, number)
    return finish(process)


def assert_stopped_well(config: Path, out: str, error: str) -> Path:
    """A complete checkpoint of the last step made, and the sentence how to go on."""
    folder = run_folder(config)
    assert metrics(folder)[-1]["step"] < STEPS
    assert steps_saved(folder)[-1] == metrics(folder)[-1]["step"]
    assert is_complete(last(folder))
    assert f"stopped at step {steps_saved(folder)[-1]}; checkpoint: {last(folder)}" in out
    assert f"to go on: longtake train {folder}" in out
    assert error.count("stopping after this step with a checkpoint") == 1
    return folder


@pytest.mark.parametrize(
    ("number", "words", "is_terminal"),
    [
        pytest.param(signal.SIGINT, ("--num-workers", "1"), True, id="Ctrl-C with a loader"),
        pytest.param(signal.SIGTERM, (), False, id="SIGTERM"),
    ],
)
def test_a_stopped_run_says_how_to_go_on_and_goes_on_bit_by_bit(
    config: Path, undisturbed: Path, number: signal.Signals, words: tuple[str, ...], is_terminal: bool
) -> None:
    code, out, error = stopped(config, number, *words, to_all=is_terminal, fresh=is_terminal)
    assert code == EXIT_INTERRUPTED
    assert "Traceback" not in error
    folder = assert_stopped_well(config, out, error)
    train_here(folder, "--num-workers", "0")
    assert_the_undisturbed_run(folder, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "words"),
    [
        pytest.param(signal.SIGINT, ("--num-workers", "1"), id="Ctrl-C with loaders"),
        pytest.param(signal.SIGTERM, (), id="SIGTERM"),
        pytest.param(
            signal.SIGTERM,
            ("--num-workers", "1"),
            id="SIGTERM with loaders",
        ),
    ],
)
def test_two_processes_under_torchrun_stop_together(
    config: Path, undisturbed: Path, number: signal.Signals, words: tuple[str, ...]
) -> None:
    fresh = number == signal.SIGTERM and not words
    _, out, error = stopped(config, number, *words, processes=2, fresh=fresh)  # the exit code is torchrun's own
    folder = assert_stopped_well(config, out, error)
    code, _, error = finish(start("train", folder, processes=2))
    assert code == 0, error
    assert [line["digest"] for line in metrics(folder)] == [line["digest"] for line in metrics(undisturbed)]


@pytest.mark.slow
def test_a_schedulers_warning_passes_through_torchrun(config: Path) -> None:
    heard = ("--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1")
    process = start("train", config, processes=2, launch=heard, program=pausing(config.parent, PAUSE))
    wait_until(process, lambda: len(metrics(run_folder(config))) >= SAVED_EVERY + 2)
    process.send_signal(signal.SIGUSR1)
    _, out, error = finish(process)
    assert_stopped_well(config, out, error)


ONE_FAILS = """
import os, sys
from longtake.cli import main
from longtake.contracts import UserError
from longtake.data.loading.dataset import SlotDataset

read, count = SlotDataset.__getitem__, 0


def fails_later(self, slot):
    global count
    count += 1
    if count > 5:
        raise UserError("the disk of this node is gone")
    return read(self, slot)


if os.environ["RANK"] == "1":
    SlotDataset.__getitem__ = fails_later
main(sys.argv[1:])
"""


@pytest.mark.slow
def test_an_error_of_one_process_ends_the_others_with_a_sentence_too(config: Path) -> None:
    program = config.parent / "one_fails.py"
    program.write_text(ONE_FAILS, encoding="utf-8")
    code, _, error = finish(start("train", config, processes=2, program=(str(program),)))
    assert code == 1  # torchrun's own
    assert "longtake (rank 1): the disk of this node is gone" in error
    assert "[rank0]" not in error  # what torch writes before each line of a traceback
    assert "longtake: rank 0: the connection to another process of the run is lost" in error


def test_loaders_end_with_their_run(config: Path) -> None:
    others = set(multiprocessing.active_children())  # of tests before this one, in the same process
    train_here(config, "--num-workers", "2", "--max-steps", "2")
    assert set(multiprocessing.active_children()) <= others


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_run_stopped_while_it_loads_ends_at_once(config: Path, number: signal.Signals) -> None:
    fresh = number == signal.SIGUSR1
    process = start("train", config, "--max-steps", "100000", fresh=fresh)  # not over before the signal comes
    wait_until(process, lambda: run_folder(config).exists())
    process.send_signal(number)
    code, _, error = finish(process)
    assert "Traceback" not in error
    assert code == EXIT_INTERRUPTED
    assert "longtake: interrupted" not in error or not run_folder(config).exists()  # a new folder is taken back


def test_two_launches_never_work_in_one_folder(config: Path) -> None:
    first = start("train", config, program=pausing(config.parent, PAUSE))
    wait_until(first, lambda: len(metrics(run_folder(config))) > 1)
    code, _, error = finish(start("train", run_folder(config)))
    assert code == 2
    assert f"{run_folder(config)}: another launch is training in this folder; stop it first" in error
    first.send_signal(signal.SIGINT)
    assert finish(first)[0] == EXIT_INTERRUPTED
    steps = [line["step"] for line in metrics(run_folder(config))]
    assert steps == list(range(1, len(steps) + 1))


HANGING = """
import sys, time
from longtake.cli import main
from longtake.data.loading.dataset import SlotDataset
SlotDataset.__getitem__ = lambda self, slot: time.sleep(600)
main(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_run_whose_data_never_come_gives_up_and_says_where_it_waits(config: Path) -> None:
    words = ("train", config, "--num-workers", "1", "--first-step-timeout", "15")
    code, _, error = finish(start(*words, program=("-c", HANGING)))
    assert code == EXIT_NO_FIRST_STEP, error
    assert "first_step_timeout = 15: no training step was finished in this many seconds" in error
    assert "stream.py" in error  # where the trainer waits
    report = next(run_folder(config).glob("hang-*/rank-00000.txt")).read_text(encoding="utf-8")
    assert "rank 0 of 1, after step 0: made no step in time" in report
    assert "stream.py" in report
