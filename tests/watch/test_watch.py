"""`longtake watch` on a real tiny run: newest first, once each, with page, curves and leases; and what it refuses."""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
import sys
import time
from html import unescape
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from longtake.checkpoint.runs import list_checkpoints
from longtake.cli import watch as watch_verb
from longtake.contracts import UserError
from longtake.track.progress import PlainProgress
from longtake.train.run import train_run
from longtake.watch import watching
from longtake.watch.watching import WatchOptions, watch_runs
from tests.pages import Page
from tests.train.runs import PATIENCE_SECONDS, write_config

PROMPTS = ["a red circle moves left", "a blue square moves up"]
SAMPLING = {"num_steps": 2, "guidance": 1.5, "resolution": "32px", "num_frames": 8, "aspect_ratio": "1:1"}
VALIDATION = {"prompts": PROMPTS, "sampling_option": SAMPLING, "heldout": 0.3, "levels": [0.5], "ema": "both"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, clips: Path) -> Path:
    config = write_config(
        tmp_path_factory.mktemp("watched"),
        clips,
        validation=VALIDATION,
        validate_every=6,
        ckpt_every=3,
        tensorboard=True,
    )
    return train_run(str(config), ("--max-steps", "6"), Console(file=io.StringIO())).folder


def watched(run: Path, **options: object) -> list[str]:
    said: list[str] = []
    watch_runs([run], WatchOptions(once=True, **options), said.append)
    return said


def test_checkpoints_are_validated_once_newest_first_and_as_the_run_does_itself(trained: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    script = "import json, os, sys; print(json.dumps({'files': len(os.listdir(sys.argv[1]))}))"
    said = watched(run, metrics=f'{sys.executable} -c "{script}"')
    validated = [line for line in said if ": step " in line]
    assert [line.split("step ")[1].split(",")[0] for line in validated] == ["6", "6", "3", "3"]
    lines = [json.loads(line) for line in (run / "watch" / "validation.jsonl").read_text().splitlines()]
    own = [json.loads(line) for line in (run / "validation.jsonl").read_text().splitlines()]
    at_6 = {line["weights"]: line["loss"] for line in own if line["step"] == 6}
    assert {line["weights"]: line["loss"] for line in lines if line["step"] == 6} == pytest.approx(at_6, rel=1e-5)
    assert lines[0]["videos"].keys() >= {
        "motion",
        "flicker",
        "sharpness",
        "drift",
        "variety",
        "motion_of_data",
        "files",
    }
    made = (run / "watch" / "validation" / "step000006" / "prompt_0000.mp4").read_bytes()
    assert made == (run / "validation" / "step000006" / "prompt_0000.mp4").read_bytes()
    script = re.compile("<script>.*?</script>", re.DOTALL)  # of the two columns: no other page has one
    page = Page(script.sub("", (run / "watch.html").read_text("utf-8")))
    assert {"Curves", "Side by side", "Prompts by checkpoints", *PROMPTS} <= {text.split(".")[0] for text in page.texts}
    assert len(page.pictures) == 3 * len(PROMPTS)  # step 0 of the run itself among them
    assert list((run / "watch" / "tensorboard").iterdir())
    assert not list((run / ".leases").iterdir())
    assert watched(run) == ["all checkpoints are validated"]  # by the process before
    newer = list_checkpoints(run)[-1].path / "COMPLETE"
    newer.write_text(newer.read_text().replace('"saved_at": "20', '"saved_at": "21'))  # the run has made it again
    assert sum(": step 6" in line for line in watched(run)) == 2


def test_where_the_clips_are_not_its_videos_are_made_all_the_same(trained: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    words = ("--dataset.data_path", "gone.csv", "--validation.ema", "False")
    lacking, made, _, last = watched(run, pick="last", overrides=words)
    assert lacking.endswith("its clips are not here, so no held-out loss can be measured")
    assert made.endswith("step 6, raw weights: 2 videos")
    assert last == "all checkpoints are validated"


def test_progress_of_a_validation_is_shown(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    monkeypatch.setattr(PlainProgress, "FIRST_SECONDS", 0.0)
    monkeypatch.setattr(PlainProgress, "EVERY_SECONDS", 0.0)
    watched(run, pick="last", overrides=("--validation.ema", "False"))
    shown = capsys.readouterr().out.splitlines()
    for part in ("held-out loss", "videos"):
        name = f"{run}: step 6, raw weights, {part}: "
        shares = [int(line.removeprefix(name).removesuffix("%")) for line in shown if line.startswith(name)]
        assert len(shares) >= 2
        assert shares == sorted(shares)
        assert shares[-1] == 100


def test_without_a_free_gpu_it_leaves_validations_to_the_run_and_says_so(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    monkeypatch.setattr(
        watching.subprocess, "run", lambda *_, **__: (_ for _ in ()).throw(FileNotFoundError("nvidia-smi"))
    )
    said, last = watched(run, device="cuda")
    assert last == "checkpoints wait for a GPU"
    assert "no free GPU is here: validations are left to its validate_every = 6" in said
    assert not (run / "watch" / "validation").exists()


def test_alarms_are_told_once_to_the_terminal_the_log_and_a_command_and_when_they_end(
    trained: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    whole = (run / "metrics.jsonl").read_text()
    bad = "".join(json.dumps({"step": step, "loss": "NaN"}) + "\n" for step in range(7, 12))
    (run / "metrics.jsonl").write_text(whole + bad)
    words = {"device": "cuda", "on_alarm": f"tee -a {tmp_path / 'heard'}"}
    first, second = (watched(run, **words) for _ in range(2))
    (alarm,) = [line for line in first if line.startswith("ALARM")]
    assert "nan since step 7" in alarm
    command = ["longtake", "train", str(run / "config.py"), "--load", str(list_checkpoints(run)[-1].path)]
    assert alarm.endswith(f"go back to the checkpoint of step 6: {shlex.join(command)}")
    assert shlex.join(command) in unescape((run / "watch.html").read_text("utf-8"))
    assert not any("nan" in line for line in second)
    (run / "metrics.jsonl").write_text(whole)
    assert any("over: nan" in line for line in watched(run, **words))
    assert "nan since" not in (run / "watch.html").read_text("utf-8")
    heard = [json.loads(line) for line in (tmp_path / "heard").read_text().replace("}{", "}\n{").splitlines()]
    assert [(line["kind"], line["ended"]) for line in heard] == [("nan", False), ("nan", True)]


def test_an_alarm_does_not_wait_for_the_validation_of_a_checkpoint(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    seen: list[bool] = []

    def validate(*_: object) -> bool:
        with (run / "metrics.jsonl").open("a") as file:
            file.writelines(json.dumps({"step": step, "loss": "NaN"}) + "\n" for step in range(7, 12))
        until = time.monotonic() + PATIENCE_SECONDS
        while not (told := "nan since" in page.read_text("utf-8") if page.exists() else False):
            if time.monotonic() > until:
                break
            time.sleep(0.02)
        seen.append(told)
        return False

    page = run / "watch.html"
    monkeypatch.setattr(watching, "_judge", validate)
    said = watched(run, every=0.02, pick="last")
    assert seen == [True]
    assert sum(line.startswith("ALARM") for line in said) == 1


def test_a_damaged_checkpoint_is_said_and_the_one_before_it_validated(trained: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    (list_checkpoints(run)[-1].path / "run.json").write_text("garbage")
    damaged, *validated, last = watched(run, overrides=("--validation.prompts", "()", "--validation.ema", "False"))
    assert "step6: is damaged: run.json" in damaged
    assert any(": step 3, raw weights" in line for line in validated)
    assert last == f"could not be validated: {list_checkpoints(run)[-1].path}"


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_a_validation_without_room_is_one_sentence_and_the_watcher_goes_on(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))

    def judge(*_: object) -> None:
        raise error

    monkeypatch.setattr(watching.Judge, "judge", judge)
    newest, older, last = watched(run)
    assert "step6: its validation ran out of memory; give a smaller --validation.batch_size" in newest
    assert "step3: its validation ran out of memory" in older
    assert last == f"could not be validated: {', '.join(sorted(str(info.path) for info in list_checkpoints(run)))}"
    assert not list((run / ".leases").iterdir())


def test_losses_of_other_clips_or_levels_are_no_part_of_a_curve(trained: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    own = [step for step, _ in watching.curves_of(run).held_out]
    watched(run, pick="last", overrides=("--validation.prompts", "()"))
    assert [step for step, _ in watching.curves_of(run).held_out] == own == [0, 6]
    (run / "watch" / "validation.jsonl").unlink()
    watched(run, pick="last", overrides=("--validation.prompts", "()", "--validation.levels", "(0.9,)"))
    ((step, loss),) = watching.curves_of(run).held_out
    (line,) = watching.lines_of(run)[:1]
    assert (step, loss) == (6, line["levels"]["0.9"])
    assert "at noise level 0.5" not in watching.write_page(run).read_text("utf-8")


def test_all_faults_of_a_file_of_prompts_are_said_before_a_checkpoint_comes(trained: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run", ignore=shutil.ignore_patterns("epoch*")))
    file = tmp_path / "prompts.csv"
    file.write_text("text,seed,guidance,num_steps\na,x,1,2\nb,1,nan,2\nc,1,2,0\n")
    with pytest.raises(UserError) as caught:
        watched(run, overrides=("--validation.prompts", str(file)))
    for said in ("seed in row 1 is 'x'", "guidance in row 2 is 'nan'", "num_steps = 0: ", "in row 3"):
        assert said in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("--validation.heldout", "0.1"), "has not held back these clips"),
        (("--validation.clip", "3"), "validation.clip"),
    ],
)
def test_what_cannot_be_watched_is_refused(trained: Path, overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(UserError, match=said):
        watched(trained, overrides=overrides)


@pytest.mark.parametrize("pick", ["last:", "last:x", "last:-1", "newest"])
def test_pick_of_no_kind_is_refused(pick: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="last:STEP"):
        watch_verb.watch_runs([str(tmp_path)], pick=pick)


@pytest.mark.parametrize(("pick", "step"), [("last", 600), ("last:400", 400), ("last:550", 400), ("last:100", None)])
def test_pick_last_up_to_a_step_takes_the_newest_until_then(
    pick: str, step: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    infos = [
        SimpleNamespace(step=number, complete=True, epoch=0, path=tmp_path / str(number)) for number in (200, 400, 600)
    ]
    monkeypatch.setattr(watching, "list_checkpoints", lambda run: infos)
    monkeypatch.setattr(watching, "_saved", lambda info: None)
    watched_run = watching._Watched(tmp_path, *[None] * 4)  # type: ignore[arg-type]
    due = watched_run.due(set(), pick)
    assert (None if due is None else due.step) == step
