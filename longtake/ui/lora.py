"""The tab that trains adapters on a folder of clips: the plan first, then the queue."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longtake import pages
from longtake.contracts import UserError
from longtake.presets import presets
from longtake.track.devices import GPUS
from longtake.train.run_file import CONFIG_FILE
from longtake.ui.data import Clips
from longtake.ui.generate import flag
from longtake.ui.queue import Queue, QueuedCommand
from longtake.ui.roots import MalformedPath, Roots
from longtake.ui.shown import box, clear_on_change, frame, keep_fresh, mistake, told

FIELDS = ("base", "weights", "clips", "trigger", "name", "rank", "steps", "rate", "gpu")
_HUB = re.compile(r"[\w.-]+/[\w.-]+(/[\w.-]+)?")  # a name on the Hugging Face hub
_NAME = re.compile(r"\w[\w.-]{0,59}")  # at most 240 bytes
_MOST_SECONDS = 600  # of a plan: the first with `compile` traces for minutes


def words_of(form: Mapping[str, Any], roots: Roots) -> list[str]:
    """Return the arguments of `longtake train` for a filled-in form. Raises `UserError` for a field that is missing or
    outside the page's folders."""
    clips = roots.path(form["clips"], "clips")
    if not _NAME.fullmatch(form["name"] or ""):
        raise UserError(f"name {form['name'] or ''!r}: give the run one of letters, digits, - and _, such as my_lora")
    if (roots.folders[0] / form["name"]).exists():
        raise UserError(f"name {form['name']}: there is such a run; give another, or go on with it in the tab Runs")
    if form["base"] in {one.name for one in presets()}:
        words = [form["base"]]
    else:
        base = roots.path(form["base"], "base")
        if not (base / CONFIG_FILE).is_file():
            raise UserError(
                f"base {form['base']}: is no run and no preset; give the folder of a run, or a preset's name"
            )
        words = [str(base / CONFIG_FILE), "--model.from-pretrained", str(base)]
    if form["weights"]:
        words += flag("model.from-pretrained", _weights(form["weights"], roots))
    words += [*flag("dataset.data-path", clips), "--outputs", str(roots.folders[0]), "--exp-name", form["name"]]
    if form["trigger"]:
        words += flag("dataset.caption-prefix", f"{form['trigger'].strip().rstrip(',')}, ")
    rank = _text(form["rank"]) or "16"
    words += [*flag("lora.rank", rank), *flag("lora.alpha", rank)]
    for name, key in (("steps", "max-steps"), ("rate", "optim.lr")):
        if text := _text(form[name]):
            words += flag(key, text)
    return words


def _text(value: object) -> str:
    return str(value or "").strip()


def _weights(text: str, roots: Roots) -> str:
    try:
        return str(roots.path(text, "weights"))
    except MalformedPath:
        raise
    except UserError:
        if _HUB.fullmatch(text) and ".." not in text and not Path(text).exists():
            return text
        raise


class Adapters:
    """Handlers of the tab LoRA."""

    def __init__(self, roots: Roots, queue: Queue):
        self.roots, self.queue = roots, queue

    def bases(self) -> list[tuple[str, str]]:
        """Presets that train adapters, and runs whose model may get some."""
        files = {one.name: one.path for one in presets() if one.kind == "train"}
        own = [name for name, path in files.items() if "\nlora = dict(" in path.read_text("utf-8")]
        runs = [name for name in self.roots.models() if (Path(name) / CONFIG_FILE).is_file()]
        return [*((name, name) for name in own), *self.roots.named(runs)]

    def command(self, *values: Any) -> tuple[str, str]:
        form = dict(zip(FIELDS, values, strict=True))
        if not (form["clips"] and form["name"]):
            return "", box(pages.html('<p class="said">Name a folder of clips, and the run.</p>'))
        try:
            return QueuedCommand(Path(), "train", ("train", *words_of(form, self.roots))).command, ""
        except (UserError, OSError) as error:
            return "", mistake(error)

    def plan(self, *values: Any) -> tuple[str, str]:
        """Return the page of `longtake plan` for the form's run on one GPU, or what is wrong; and the form it is of,
        none where there is no plan."""
        form = dict(zip(FIELDS, values, strict=True))
        words, page = words_of(form, self.roots), self.roots.own / "pages" / "plan.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.unlink(missing_ok=True)
        asked = ["plan", *words, "--gpus", "1", "--gpu", str(form["gpu"]), "--html", str(page)]
        command = [sys.executable, "-m", "longtake", *asked]
        options: dict[str, Any] = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
        try:
            done = subprocess.run(command, timeout=_MOST_SECONDS, **options)
        except subprocess.TimeoutExpired:
            raise UserError(f"plan: took longer than {_MOST_SECONDS} s; run the command in a terminal") from None
        said = pages.html("<pre>{}</pre>", (done.stdout + done.stderr).strip())
        fits = pages.html(
            '<p class="{}">{}</p>', *(("good", "It fits.") if done.returncode == 0 else ("bad", "See below."))
        )
        if not page.exists():
            return box(fits, said), ""
        return box(fits, pages.folded("what `longtake plan` printed", said)) + frame(page), str(words)

    def start(self, planned: str, *values: Any) -> str:
        form = dict(zip(FIELDS, values, strict=True))
        words = words_of(form, self.roots)
        if str(words) != planned:
            raise UserError("The form has changed: press Show the plan again")
        if any(not job.is_over and form["name"] in job.words for job in self.queue.jobs()):
            raise UserError(f"name {form['name']}: a command of the queue has it; give another, or take that one off")
        return self.queue.add("train", ["train", *words]).command


def build(roots: Roots, queue: Queue) -> None:
    """Build the tab."""
    import gradio as gr

    adapters = Adapters(roots, queue)
    bases, made = adapters.bases(), {}
    with gr.Row():
        with gr.Column(scale=2, min_width=320):
            made["base"] = gr.Dropdown(
                bases, label="Base", info="a preset, or a run of yours", allow_custom_value=True, elem_id="base"
            )
            made["weights"] = gr.Textbox(label="Weights", info="a file, or a name on the hub; empty: the base's own")
            about, tables = "a folder or table inside the page's folders", Clips(roots).tables()
            made["clips"] = gr.Dropdown(
                tables, value=None, label="Clips", info=about, allow_custom_value=True, elem_id="clips"
            )
            made["trigger"] = gr.Textbox(label="Trigger word", info="put in front of every caption", elem_id="trigger")
            made["name"] = gr.Textbox(label="Name of the run", elem_id="lora_name")
        with gr.Column(scale=1, min_width=280):
            made["rank"] = gr.Textbox("16", label="Rank", elem_id="rank")
            made["steps"] = gr.Textbox("1000", label="Steps", elem_id="lora_steps")
            made["rate"] = gr.Textbox("1e-4", label="Learning rate", elem_id="rate")
            made["gpu"] = gr.Dropdown(
                sorted(gpu.name for gpu in GPUS), value="4090", label="GPU to plan for", elem_id="gpu"
            )
    command = gr.Textbox(label="Command", lines=2, max_lines=8, interactive=False, buttons=["copy"])
    wrong = gr.HTML(elem_id="lora_wrong")
    with gr.Row():
        plan = gr.Button("Show the plan", variant="primary", elem_id="plan")
        start = gr.Button("Put on the queue", elem_id="train")
    page, planned = gr.HTML(elem_id="plan_page"), gr.State("")
    fields = [made[name] for name in FIELDS]
    changes = [field.change for field in fields]
    gr.on(changes, adapters.command, fields, [command, wrong], trigger_mode="always_last", show_progress="hidden")
    clear_on_change(fields, [page, planned])  # a plan of another form
    plan.click(told(adapters.plan), fields, [page, planned])

    def put(*values: Any) -> None:
        gr.Info(f"on the queue, see the tab Runs: {adapters.start(*values)}")

    start.click(told(put), [planned, *fields], None, show_progress="hidden")
    for field, choices in (("base", adapters.bases), ("clips", Clips(roots).tables)):
        keep_fresh(made[field], choices)
