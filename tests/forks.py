"""Python processes that start with everything imported: forks of a server that has torch and Longtake loaded.

A fresh interpreter spends seconds on imports before it does what a test is about. `on_processes` and `Forked` take a
fork of one server instead, which this process starts when it first needs it. The server has no second thread of
Python's or OpenMP's, so that a fork finds no lock held.

Forks of one server have the hash seed of the server and leave without the interpreter's own end: where a test is about
a start, an end or what differs between interpreters, it starts a real one.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import chdir, suppress
from multiprocessing import forkserver
from multiprocessing.context import get_spawning_popen
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
_CONTEXT = multiprocessing.get_context("forkserver")


def serve() -> None:
    """Starts the server if this process has none yet and is no fork of one."""
    if multiprocessing.parent_process() is not None:
        return
    with pytest.MonkeyPatch.context() as patch, chdir(ROOT):  # whose modules it is to find
        patch.setenv("OMP_NUM_THREADS", "1")
        _CONTEXT.set_forkserver_preload(["tests.preloaded"])
        forkserver.ensure_running()


def processor_seconds() -> float:
    """What the server and those of its forks that have ended have cost this process's tests."""
    server = forkserver._forkserver._forkserver_pid
    if server is None:
        return 0.0
    with suppress(OSError):
        fields = Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def on_processes(play: Callable[..., None], size: int, *args: Any) -> None:
    """`play(rank, *args)` in `size` processes at once; an error in one of them is raised here."""
    from torch.multiprocessing import start_processes

    serve()
    test = os.environ.get("PYTEST_CURRENT_TEST", "")
    start_processes(_play, (test, play, *args), nprocs=size, start_method="forkserver")


def _play(rank: int, test: str, play: Callable[..., None], *args: Any) -> None:
    os.environ["PYTEST_CURRENT_TEST"] = test  # the server's is that of the test which started it
    play(rank, *args)


class Forked(subprocess.Popen):
    """`subprocess.Popen` for a command that begins with `sys.executable`, without the start of an interpreter.

    Knows the options that the tests use. What it starts is a child of the server; its name in the system is that of
    the process which asked for it, `started_by` reads it.
    """

    def _execute_child(
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, gid, gids, uid, umask,
        start_new_session, *_,
    ) -> None:  # fmt: skip
        words = [os.fspath(word) for word in args]
        assert words[0] == sys.executable, "the server has this interpreter only"
        assert not shell
        assert preexec_fn is None
        serve()
        streams = [_Stream(own if given == -1 else given) for own, given in enumerate((p2cread, c2pwrite, errwrite))]
        begun, begins = _CONTEXT.Pipe(duplex=False)
        place, variables = os.fspath(cwd or os.getcwd()), dict(os.environ if env is None else env)
        self._fork: BaseProcess = _CONTEXT.Process(
            target=_main, args=(words[1:], place, variables, streams, bool(start_new_session), begins, os.getpid())
        )
        self._fork.start()
        self._child_created, self.pid = True, self._fork.pid
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
        begins.close()
        with suppress(EOFError):
            begun.recv()  # its group and its name are there from now on

    def poll(self) -> int | None:
        return self.wait(0) if self.returncode is None and not self._fork.is_alive() else self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._fork.join(timeout)
            self.returncode = self._fork.exitcode
            if self.returncode is None:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self.returncode

    def _internal_poll(self, _deadstate: int | None = None, **_: Any) -> int | None:
        return self.poll()


def run(words: Sequence[object], timeout: float | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` with its output captured, by a fork."""
    with Forked(
        [str(word) for word in words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    ) as process:
        try:
            out, error = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, error)


def started_by(name: str) -> int | None:
    """The process that asked for a fork of this name."""
    return int(name.removeprefix("of ")) if name.startswith("of ") else None


class _Stream:
    """A file descriptor that goes along to a fork."""

    def __init__(self, number: int):
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        popen = get_spawning_popen()
        return _received, (popen.DupFd(popen.duplicate_for_child(self.number)),)


def _received(descriptor: Any) -> int:
    return descriptor.detach()


def _main(
    words: list[str], place: str, variables: Mapping[str, str], streams: list[int], session: bool, begins: Any, by: int
) -> None:
    """What `python *words` does, to its end."""
    if session:
        os.setsid()
    Path("/proc/self/comm").write_text(f"of {by}")
    begins.send(None)
    begins.close()
    forkserver._forkserver.ensure_running = lambda: None  # the server of this fork serves it too
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", buffering=1), open(2, "w", buffering=1)  # noqa: SIM115
    os.chdir(place)
    os.environ.clear()
    os.environ.update(variables)
    try:
        _interpret(words)
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        traceback.print_exception(error)
        code = None if isinstance(error, KeyboardInterrupt) else 1
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    if code is None:  # an interpreter that Ctrl-C ends says so to its parent
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


def _interpret(words: list[str]) -> None:
    """`-m module`, `-c code` or a file, with what follows as its words."""
    words = words[words[0] == "-u" :]  # torchrun's workers; a fork writes each line at once
    first, rest = words[0], words[1:]
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in paths if path]
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    elif first == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        assert not first.startswith("-"), "options of the interpreter want a real one"
        sys.path.insert(0, str(Path(first).resolve().parent))
        sys.argv = words
        runpy.run_path(first, run_name="__main__")
