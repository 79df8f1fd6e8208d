from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from longtake.cli import main
from longtake.train.run import Outcome
from tests.generate.runs import make_run

Answer = tuple[int, str, str]  # exit code, stdout, stderr


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A trained run; its folder lies in `outputs`, beside `tiny.py`, its config, and `clips`."""
    return make_run(tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="session")
def home(run: Outcome) -> Path:
    """The folder of `tiny.py`, `clips` and `outputs`."""
    return run.folder.parent.parent


@pytest.fixture
def longtake(capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """Runs a command line in this process."""

    def longtake(*words: object) -> Answer:
        capsys.readouterr()
        with pytest.raises(SystemExit) as done:
            main([str(word) for word in words])
        said = capsys.readouterr()
        assert isinstance(done.value.code, int)
        return done.value.code, said.out, said.err

    return longtake


@pytest.fixture
def mistake(longtake: Callable[..., Answer]) -> Callable[..., str]:
    """Runs a command line that must end as a mistake: status 2, one sentence on stderr. Returns the sentence."""

    def mistake(*words: object) -> str:
        code, _, err = longtake(*words)
        assert code == 2
        assert err.startswith("longtake: ")
        assert err.count("\n") == 1
        assert "Traceback" not in err
        return err.removeprefix("longtake: ").rstrip("\n")

    return mistake
