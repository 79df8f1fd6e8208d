"""Commands of the page one after another, over the end of the page."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from longtake.contracts import UserError
from longtake.ui.queue import Queue, QueuedCommand
from longtake.ui.shown import queue_table
from tests.train.runs import PATIENCE_SECONDS


def ended(queue: Queue, name: str) -> QueuedCommand:
    until = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < until:
        queue.look()
        job = queue.job(name)
        assert job is not None
        if job.is_over:
            return job
        time.sleep(0.1)
    raise AssertionError(f"{job} does not end")


def test_a_command_outlives_the_page_and_the_next_one_finds_it_what_waits_and_why_one_failed(tmp_path: Path) -> None:
    first = Queue(tmp_path)
    names = [first.add("generate", words).name for words in (["--version"], ["no-such-verb"], ["--version"])]
    first.look()
    assert [job.state for job in first.jobs()] == ["running", "waiting", "waiting"]
    with pytest.raises(UserError, match="another `longtake ui` is open here"):
        Queue(tmp_path)
    first.close()
    second = Queue(tmp_path)
    assert second.stop(names[2]) == "taken off the queue"
    done = ended(second, names[0])
    assert (done.state, done.log()[:8]) == ("done", "longtake")
    assert ended(second, names[1]).state == "failed"
    assert "No such command &#x27;no-such-verb&#x27;" in queue_table(second.jobs())
    assert [job.state for job in second.jobs()] == ["done", "failed", "stopped"]
    second.close()


def test_a_command_that_vanished_with_its_machine_counts_as_failed(tmp_path: Path) -> None:
    queue = Queue(tmp_path)
    job = queue.add("train", ["train", "x"])
    (job.folder / "job.json").write_text(
        (job.folder / "job.json").read_text().replace('"waiting"', '"running"').replace('"pid": 0', '"pid": 1')
    )
    assert ended(queue, job.name).state == "failed"  # process 1 is another one
    queue.close()


@pytest.mark.parametrize("text", ["half \ud83d an emoji", "\udc00", "a\0b", "x" * 200_000, "é" * 60_000])
def test_argument_that_no_process_takes_is_refused(tmp_path: Path, text: str) -> None:
    queue = Queue(tmp_path)
    with pytest.raises(UserError):
        queue.add("generate", ["generate", "m", "--prompt", text])
    assert queue.jobs() == []
    assert queue.add("generate", ["--prompt", "a whole emoji 😀"]).words[1] == "a whole emoji 😀"
    queue.close()


def test_job_that_cannot_begin_or_end_fails_alone_with_its_reason(tmp_path: Path) -> None:
    queue = Queue(tmp_path)
    jobs = [queue.add("generate", ["--version"]) for _ in range(4)]
    QueuedCommand(jobs[0].folder, "generate", ("x" * 3_000_000,)).write()
    QueuedCommand(jobs[1].folder, "generate", ("half \ud83d",)).write()
    QueuedCommand(jobs[2].folder, "generate", ("x",), state="running", pid="none").write()
    for _ in range(3):
        queue.look()
    assert [queue.job(jobs[i].name).state for i in (0, 2)] == ["failed", "failed"]
    assert "too long" in queue.job(jobs[0].name).log()
    assert str(queue_table(queue.jobs())).encode("utf-8")
    assert ended(queue, jobs[1].name).state == "failed"
    assert ended(queue, jobs[3].name).state == "done"
    queue.close()
