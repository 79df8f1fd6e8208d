"""A fork of the tests' server is to a test what a fresh interpreter would be, but for its start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import forks
from tests.train.runs import PATIENCE_SECONDS, kill

WORDS = """
import os, sys
print(sys.argv, os.getcwd(), os.environ["MARK"], "HOME" in os.environ, __name__)
print("heard", file=sys.stderr)
"""


def alike(words: list[str], **options: object) -> subprocess.CompletedProcess[str]:
    """What a fork does with `words`; a fresh interpreter does the same."""
    found = forks.run([sys.executable, *words], timeout=PATIENCE_SECONDS, **options)
    fresh = subprocess.run([sys.executable, *words], capture_output=True, text=True, **options)
    assert (found.returncode, found.stdout) == (fresh.returncode, fresh.stdout)
    assert found.stderr.splitlines()[-1:] == fresh.stderr.splitlines()[-1:]
    return found


def test_words_folder_variables_and_streams_are_those_asked_for(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(WORDS, encoding="utf-8")
    for words in (["-c", WORDS, "a", "b"], ["program.py", "a"]):
        done = alike(words, cwd=tmp_path, env={"MARK": "here"})
        assert f"{tmp_path} here False __main__" in done.stdout
        assert done.stderr == "heard\n"
    done = alike(["-m", "program", "a"], cwd=tmp_path, env={"MARK": "here"})
    assert str(tmp_path / "program.py") in done.stdout


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("import sys; sys.exit(3)", 3),
        ("import sys; sys.exit('no')", 1),
        ("1 / 0", 1),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("import atexit; atexit.register(print, 'left')", 0),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()", 0),
    ],
)
def test_it_ends_as_an_interpreter_does(code: str, status: int) -> None:
    assert alike(["-c", code]).returncode == status


def test_torch_is_there_from_the_start_and_no_thread_but_the_first() -> None:
    code = """
import os, sys
names = {open(f"/proc/self/task/{number}/comm").read() for number in os.listdir("/proc/self/task")}
print("torch" in sys.modules, "longtake.train" in sys.modules, len(names - {"jemalloc_bg_thd\\n"}))
"""
    assert forks.run([sys.executable, "-c", code]).stdout == "True True 1\n"


def test_signals_reach_it_and_what_it_has_started_is_known() -> None:
    code = """
import subprocess, sys, time
from tests.forks import Forked
below = Forked([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(below.pid, flush=True)
time.sleep(600)
"""
    process = forks.Forked([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert os.getsid(process.pid) == process.pid
    below = int(process.stdout.readline())
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    kill(process)
    assert process.returncode == -signal.SIGKILL
    process.stdout.close()
    end = time.monotonic() + PATIENCE_SECONDS
    while Path(f"/proc/{below}").exists():
        assert time.monotonic() < end
        time.sleep(0.01)


def _failing(rank: int) -> None:
    assert rank == 0, "rank one fails"


def test_an_error_of_one_of_many_is_raised() -> None:
    with pytest.raises(Exception, match="rank one fails"):
        forks.on_processes(_failing, 2)
