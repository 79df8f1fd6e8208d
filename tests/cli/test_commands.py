"""Every command that the documentation or a sentence of the program names is one that works."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer

from longtake.cli.app import app
from longtake.cli.launch import with_verb
from longtake.generate.read import read_generation
from longtake.generate.source import resolve_source
from longtake.presets import find_preset
from longtake.system.export import export_model
from longtake.train.config import RunWithoutTable
from longtake.train.run import Outcome
from longtake.train.run_file import keys_of_generation, read_curriculum, read_run

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
VERBS = "train|generate|demo|plan|launch|preset|data|config|checkpoint"


def documented() -> Iterator[str]:
    """The command lines in the fenced blocks of the pages, and those in backticks."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        lines = [line for language, block in fenced if not language for line in block.splitlines()]
        prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
        yield from (line for line in lines if re.match(rf"longtake ({VERBS}) |torchrun .*-m longtake", line))
        yield from re.findall(rf"(?<!`)`(longtake (?:{VERBS})[^`]*)`", prose)


LINES = [  # those on outputs/i2v run in test_docs.py
    line for line in dict.fromkeys(documented()) if "outputs/i2v" not in line and not line.endswith("--help")
]


def suggested() -> Iterator[str]:
    """The commands in the strings of the program: those in backticks, and those that end a string."""
    for path in sorted((ROOT / "longtake").rglob("*.py")):
        if "presets" in path.parts:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        inner |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
        for node in ast.walk(tree):
            text = ""
            if isinstance(node, ast.JoinedStr):
                text = "".join(str(p.value) if isinstance(p, ast.Constant) else "{}" for p in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
                text = node.value
            for line in re.findall(rf"(?:torchrun [^`]*-m )?longtake (?:{VERBS}) [^`]+", text):
                if leaf(line.split()[line.split().index("longtake") + 1 :])[1]:  # more than the name of a verb
                    yield line


def leaf(words: list[str]) -> tuple[typer.core.TyperCommand, list[str]]:
    """The verb of a command line and the words behind it."""
    command = typer.main.get_command(app)
    while isinstance(command, typer.core.TyperGroup) and words and words[0] in command.commands:
        command, words = command.commands[words[0]], words[1:]
    return command, words


@pytest.fixture(scope="module")
def place(run: Outcome, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with what the commands name: run files, a table, a run under many names."""
    folder = tmp_path_factory.mktemp("place")
    for name in ("run", "my_run", "x", "other", "FILE"):
        shutil.copy(find_preset("custom"), folder / f"{name}.py")
    tiny = (run.folder.parent.parent / "tiny.py").read_text(encoding="utf-8")
    (folder / "RUN.py").write_text(tiny.replace("fps_max=24", "fps_max=24, views=1"), encoding="utf-8")
    shutil.copytree(run.folder.parent.parent / "clips", folder / "clips")
    stages = "stages = [dict(name='stage1', max_steps=1), dict(name='video', max_steps=1)]"
    (folder / "curriculum.py").write_text(f"_base_ = 'run.py'\n{stages}\n", encoding="utf-8")
    (folder / "hosts").write_text("localhost slots=1\n", encoding="utf-8")
    shutil.copytree(run.folder, folder / "output_dir" / "run")  # where scripts of other programs write
    for name in ("my_run", "my_lora", "full_run", "stage1", "stage1_i2v", "run", "demo/run", "custom"):
        shutil.copytree(run.folder, folder / "outputs" / name)
    for name in ("base", "my_model"):
        export_model(str(run.folder), folder / f"{name}.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


@pytest.mark.parametrize("line", LINES)
def test_a_command_of_the_pages_is_understood(line: str, place: Path) -> None:
    words = shlex.split(line.replace("[--key value]", ""), comments=True)
    command, rest = leaf(with_verb(words[words.index("longtake") + 1 :]))
    verb, own = command.name, "outputs/run" if command.name == "generate" else "RUN.py"
    if not rest:
        return  # a verb is named
    with command.make_context(verb, [re.sub(r"^(RUN|FILE|outputs/NAME)$", own, word) for word in rest]) as context:
        run, overrides = context.params.get("run"), list(context.args)
    if run is None or verb not in ("train", "generate", "plan", "encode", "show"):
        return
    source = str(find_preset(run, "inference" if verb == "generate" else "train") or run)
    if verb == "generate":
        resolve_source(source, overrides)
    elif keys_of_generation(Path(source)):
        read_generation(Path(source), overrides)
    else:
        staged = read_curriculum(source) if "--stage" not in overrides else None
        own_stage = [] if staged is None else ["--stage", staged.stages[0].name]
        read_run(source, [*overrides, *own_stage], RunWithoutTable)


# As written -> what fills it in the working directory above; None: too long to run, it is only read.
SUGGESTED = {
    "longtake data encode RUN -o {}": "longtake data encode RUN.py -o clips.latents",
    "longtake data encode RUN -o FOLDER": "longtake data encode RUN.py -o clips.latents",
    "longtake data encode RUN -o {} --mend": "longtake data encode RUN.py -o clips.latents --mend",
    "longtake data encode RUN -o FOLDER --mend": "longtake data encode RUN.py -o clips.latents --mend",
    "longtake data encode RUN -o FOLDER --verify": "longtake data encode RUN.py -o clips.latents --verify",
    "longtake data stats {}": "longtake data stats clips/clips.parquet",
    "longtake data stats TABLE --run RUN": "longtake data stats clips/clips.parquet --run RUN.py",
    "longtake data probe TABLE -o OUTPUT --decode-check": (
        "longtake data probe clips/clips.csv -o checked.parquet --decode-check"
    ),
    "longtake data probe {} -o clips.csv": "longtake data probe clips -o clips.csv",
    "longtake launch --hostfile FILE -- train RUN": "longtake launch --hostfile hosts --dry-run -- train RUN.py",
    "longtake plan RUN --target-step-seconds 12 --probe": (
        "longtake plan RUN.py --gpus 1 --target-step-seconds 0.02 --probe"
    ),
    "longtake plan RUN --measure": None,  # tests/cli/test_plan.py
    "longtake demo --folder {}{}": None,
    "longtake demo --folder {} --system {}": None,
    "longtake train {} --dataset.data-path clips.csv": None,
    "longtake train custom --dataset.data-path {}": None,
    "longtake generate {} --prompt {} --save-dir {}": "longtake generate outputs/run --prompt a --save-dir videos",
    "longtake checkpoint export {} weights.safetensors": "longtake checkpoint export outputs/run weights.safetensors",
    "longtake generate {} --prompt 'what the video shows'": "longtake generate outputs/run --prompt 'a'",
    "longtake train {}": "longtake train outputs/run",
    "longtake config show {}": "longtake config show outputs/run",
    "longtake generate {}": "longtake generate outputs/run --prompt b",
    "longtake checkpoint export {} merged.safetensors --merge": None,  # of adapters: tests/generate
    "longtake checkpoint export {} adapters --lora peft": None,
    "torchrun --nproc_per_node {} -m longtake plan RUN --gpus {} --probe": "longtake plan RUN.py --gpus 1 --probe",
}


def test_the_commands_that_the_program_suggests_are_the_ones_tried_here() -> None:
    assert set(suggested()) == set(SUGGESTED)


def test_every_suggested_command_runs(place: Path, longtake: Callable[..., tuple[int, str, str]]) -> None:
    for line, filled in SUGGESTED.items():
        words = shlex.split(filled or line.replace("{}", "demo/shapes"))
        words = words[words.index("longtake") + 1 :]
        if filled is None:
            command, rest = leaf(words)
            command.make_context(command.name, rest)
            continue
        code, _, err = longtake(*words)
        assert code == 0, f"{filled}\n{err}"
