"""What is asked of a run that trains, by files in its folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from longtake.contracts import UserError
from longtake.train.asking import ask_run
from longtake.train.health import interrupt
from longtake.train.loop import Trainer
from tests.train.runs import assert_one_sentence, exact, run_command, train_here, write_config


def test_a_running_run_samples_saves_and_stops_when_it_is_asked(
    clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_config(tmp_path, clips, validation={"heldout": 0.3, "levels": [0.5]}, validate_every=100)
    folder, asked, compute = (
        tmp_path / "outputs" / "tiny",
        {2: "save", 3: "sample", 5: "stop"},
        Trainer.forward_backward,
    )
    answers = []

    def asking(self: Trainer, *args: object) -> object:
        if (what := asked.get(self.clock.global_step + 1)) is not None:
            answers.append(ask_run(folder, what))
        return compute(self, *args)

    monkeypatch.setattr(Trainer, "forward_backward", asking)
    monkeypatch.setattr(interrupt, "_LOOK_SECONDS", -1.0)
    outcome, _ = train_here(config)
    assert outcome.stopped
    steps = sorted(int(path.name.rpartition("step")[2]) for path in folder.glob("epoch*"))
    assert steps == [3, len(exact(folder))]  # a step's numbers are read while the next one runs
    assert outcome.clock.global_step == 6
    assert [path.name for path in sorted((folder / "validation").glob("step*"))] == ["step000000", "step000004"]
    assert [answer.split(": ")[1].split(" after")[0] for answer in answers] == [
        "writes a checkpoint",
        "makes a validation",
        "writes a checkpoint and stops",
    ]
    with pytest.raises(UserError, match="no run is training there; start it with `longtake train"):
        ask_run(folder, "save")
    assert not list(folder.glob(".now-*"))


@pytest.mark.parametrize("content", ['{"what": "stop"}', '{"what": "stop", "launch": 1}', "", "[]", '{"launch": "x"}'])
def test_request_left_by_an_earlier_launch_does_not_stop_the_next(
    config: Path, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupt, "_LOOK_SECONDS", -1.0)
    folder = train_here(config, "--max-steps", "1")[0].folder
    (folder / ".now-stop").write_text(content)
    (folder / ".now-save").mkdir()
    outcome, _ = train_here(folder, "--max-steps", "3")
    assert not outcome.stopped
    assert outcome.clock.global_step == 3
    assert not (folder / ".now-stop").exists()


def test_another_word_is_one_sentence_with_those_that_there_are(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    code, _, error = run_command(capsys, ["now", tmp_path, "bake"])
    assert_one_sentence(code, error, "'bake' is not one of 'sample', 'save', 'stop'")
    assert "Value error" not in error
