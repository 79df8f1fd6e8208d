"""Write docs/cli.md, the reference of every verb and option, from the program itself.

python tools/cli_reference.py            write the page
python tools/cli_reference.py --check    exit 1 if the page is not what would be written
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import typer
from generated_page import write_or_check
from typer.models import ArgumentInfo, OptionInfo, ParameterInfo

from longtake.cli.app import NAME, app

PAGE = Path(__file__).parent.parent / "docs" / "cli.md"
HEAD = """# Every verb and option

Look a verb of the command line up here. `longtake VERB --help` prints the same.

```
longtake train custom --dataset.data-path clips --max-steps 2000
```

Written by `python tools/cli_reference.py` from the program. RUN is a config file, a preset's name, or the folder of an
earlier run. `--key value` after it overrides any key of the config ([every key](config_keys.md)). Exit status: 0 done,
2 a mistake (one sentence on stderr), 130 interrupted. `longtake --install-completion` completes verbs and options in
your shell.
"""
EXAMPLES = {  # the table at the top of the page: one line per verb
    "train": "longtake train custom --dataset.data-path clips --max-steps 2000",
    "generate": 'longtake generate outputs/demo/run --prompt "a red circle moves left" --grid',
    "demo": "longtake demo",
    "plan": "longtake plan my_run.py --gpus 8 --gpu h200",
    "doctor": "longtake doctor outputs/demo/run",
    "verify": "longtake verify cogvideox_fun/lora_2b",
    "launch": "longtake launch --hostfile hosts --nproc-per-node 8 -- train my_run.py",
    "nodes": "longtake nodes hosts",
    "stop": "longtake stop hosts --run NAME",
    "health": "longtake health outputs/NAME --hosts hosts",
    "report": "longtake report outputs/demo/run --samples outputs/demo/samples",
    "now": "longtake now outputs/NAME sample",
    "ui": "longtake ui outputs clips",
    "watch": "longtake watch outputs/NAME",
    "preset list": "longtake preset",
    "preset copy": "longtake preset copy opensora_v2/lora my_run.py",
    "data probe": "longtake data probe clips.csv -o clips.parquet --workers 8",
    "data stats": "longtake data stats clips.parquet --run my_run.py --html stats.html",
    "data filter": 'longtake data filter clips.parquet -o good.parquet --where "num_frames = 1 OR duration >= 2"',
    "data merge": "longtake data merge a.parquet b.parquet -o both.parquet",
    "data split": "longtake data split clips.parquet -o train.parquet -o held.parquet --fractions 0.98,0.02",
    "data shard": "longtake data shard clips.parquet -o shards",
    "data captions": 'longtake data captions clips.csv --find "a video of " --prefix "ohwx dog, "',
    "data encode": "longtake data encode my_run.py --dataset.views 4 -o clips.latents",
    "config show": "longtake config show my_run.py --lr 1e-3",
    "checkpoint list": "longtake checkpoint list outputs/demo",
    "checkpoint inspect": "longtake checkpoint inspect outputs/demo/run",
    "checkpoint verify": "longtake checkpoint verify outputs/demo/run",
    "checkpoint convert": "longtake checkpoint convert THUDM/CogVideoX-5b weights --model.visual inpaint",
    "checkpoint export": "longtake checkpoint export outputs/demo/run weights.safetensors",
}


@dataclass(frozen=True)
class Verb:
    """A command of the program, from its function and typer's settings."""

    name: str
    callback: Callable[..., object]
    is_open_ended: bool  # takes --key value

    @property
    def help(self) -> str:
        return inspect.getdoc(self.callback) or ""

    @property
    def first_sentence(self) -> str:
        return self.help.split("\n\n")[0]

    @property
    def anchor(self) -> str:
        return f"{NAME}-{self.name.replace(' ', '-')}"

    def parameters(self) -> list[Parameter]:
        """Its arguments and options, in the order of the function."""
        hints = get_type_hints(self.callback, include_extras=True)
        signature = inspect.signature(self.callback).parameters
        found = [Parameter(name, hints[name], signature[name].default) for name in signature]
        return [each for each in found if each.kind is not typer.Context and not each.info.hidden]


@dataclass(frozen=True)
class Parameter:
    """An argument or option: its name in Python, its annotation, and its default."""

    name: str
    annotation: Any
    default: Any

    @property
    def kind(self) -> Any:
        """The type, without `Annotated` and None."""
        inner = get_args(self.annotation)[0] if hasattr(self.annotation, "__metadata__") else self.annotation
        choices = [part for part in get_args(inner) if part is not type(None)]
        return choices[0] if get_origin(inner) in (Union, UnionType) else inner

    @property
    def info(self) -> ParameterInfo:
        """What typer was told about it."""
        found = [part for part in getattr(self.annotation, "__metadata__", ()) if isinstance(part, ParameterInfo)]
        return found[0] if found else OptionInfo()

    @property
    def is_argument(self) -> bool:
        return isinstance(self.info, ArgumentInfo)

    def written(self) -> str:
        """The argument in a usage line; the names of an option."""
        if self.is_argument:
            return (self.info.metavar or self.name.upper()).strip("[]{}")
        names = list(self.info.param_decls or [f"--{self.name.replace('_', '-')}"])
        if self.kind is bool and not self.info.param_decls and self.default is not False:
            names.append(f"--no-{self.name.replace('_', '-')}")
        return ", ".join(f"`{name}`" for name in names)

    def row(self) -> str:
        """Its row in the table of a verb."""
        name = f"`{self.written()}`" if self.is_argument else self.written()
        return f"| {name} | {self.shown_kind()} | {self.shown_default()} | {cell(self.info.help or '')} |"

    def shown_kind(self) -> str:
        if self.kind is bool:
            return "flag"
        is_list = get_origin(self.kind) is list
        kind = get_args(self.kind)[0] if is_list else self.kind
        if get_origin(kind) is Literal:
            return ", ".join(f"`{choice}`" for choice in get_args(kind))
        if issubclass(kind, Enum):
            return ", ".join(f"`{choice.value}`" for choice in kind)
        name = {str: "text", Path: "path", int: "integer", float: "number"}[kind]
        if self.info.metavar and not self.is_argument:
            name = f"`{self.info.metavar}`"
        bounds = [f"≥ {self.info.min:,g}"] if self.info.min is not None else []
        bounds += [f"≤ {self.info.max:,g}"] if self.info.max is not None else []
        return " ".join([name, *bounds, *(["(repeatable)"] if is_list else [])])

    def shown_default(self) -> str:
        if self.default is inspect.Parameter.empty:
            return "required"
        is_nothing = self.default is None or self.default is False or self.default == ()
        is_of_machine = str(self.default) == sys.executable
        return "" if is_nothing or is_of_machine or not self.info.show_default else f"`{self.default}`"


def page() -> str:
    """The whole page as Markdown."""
    verbs = list(verbs_of(app))
    if unknown := {verb.name for verb in verbs} ^ EXAMPLES.keys():
        raise SystemExit(f"tools/cli_reference.py: EXAMPLES must have one line per verb; fix {', '.join(unknown)}")
    rows = [
        f"| [{verb.name}](#{verb.anchor}) | {cell(verb.first_sentence)} | `{EXAMPLES[verb.name]}` |" for verb in verbs
    ]
    table = "\n".join(["| verb | what it does | example |", "|---|---|---|", *rows])
    return "\n".join([HEAD, f"{table}\n", *map(section, verbs)])


def verbs_of(group: typer.Typer, words: tuple[str, ...] = ()) -> Iterator[Verb]:
    """Every command that does something and is not hidden; those of groups last."""
    for command in group.registered_commands:
        if not command.hidden and command.callback is not None:
            name = command.name or command.callback.__name__.replace("_", "-")
            settings = command.context_settings or {}
            yield Verb(" ".join((*words, name)), command.callback, bool(settings.get("allow_extra_args")))
    for inner in group.registered_groups:
        if inner.typer_instance is not None:
            yield from verbs_of(inner.typer_instance, (*words, str(inner.name)))


def section(verb: Verb) -> str:
    """A heading, the usage line, the help text, and a table of arguments and options."""
    parameters = verb.parameters()
    arguments = [each.written() for each in parameters if each.is_argument]
    usage = " ".join([NAME, verb.name, *arguments, *(["[--key value ...]"] if verb.is_open_ended else [])])
    parts = [f"## {NAME} {verb.name}\n", f"```text\n{usage}\n```\n", f"{verb.help}\n"]
    if parameters:
        rows = ["| | value | default | |", "|---|---|---|---|", *(each.row() for each in parameters)]
        parts.append("\n".join(rows) + "\n")
    return "\n".join(parts)


def cell(text: str) -> str:
    """Text in one cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    write_or_check(PAGE, lambda _: page(), __doc__)
