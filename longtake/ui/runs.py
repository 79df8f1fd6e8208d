"""The tab of runs: the queue, live curves, samples by step, two runs compared, and what may be asked of a run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtake import pages
from longtake.checkpoint.runs import list_checkpoints
from longtake.contracts import UserError
from longtake.evaluate.validation import FOLDER as VIDEOS
from longtake.presets import presets
from longtake.track.trackers import METRICS_FILE
from longtake.train.report import mean_loss
from longtake.train.run_file import CONFIG_FILE
from longtake.ui.queue import Queue, QueuedCommand
from longtake.ui.roots import Roots
from longtake.ui.shown import box, clear_on_change, frame, keep_fresh, mistake, queue_table, state, told

if TYPE_CHECKING:
    from longtake.watch.alarms import Alarm

_MOST_JOBS = 12
_SECONDS = 10  # between two drawings of a run that trains
_TOO_FEW = re.compile("<div><h3>[^<]*</h3><p>Too few steps for a curve.</p></div>")
_NO_RUN = '<div class="lt"><p class="said">No run here yet: put one on the queue below, or see the tab LoRA.</p></div>'


class Runs:
    """Handlers of the tab Runs."""

    def __init__(self, roots: Roots, queue: Queue):
        self.roots, self.queue = roots, queue

    def names(self) -> list[tuple[str, str]]:
        """(name, path) of each run; a name says what alarms there are."""
        return [(_with_alarms(name, Path(path)), path) for name, path in self.roots.named(self.roots.runs())]

    def shown(self, name: str) -> str:
        """Figures and curves of a run as it stands."""
        from longtake.train.asking import is_training
        from longtake.train.report import read_record, run_sections

        if not name:
            return _NO_RUN
        try:
            run = self.roots.path(name, "run")
            record = read_record(run)
        except (UserError, OSError) as error:
            return mistake(error)
        last = record.config.max_steps
        figures = [
            ("steps" if last is None else f"steps of {last:,}", f"{record.step:,}"),
            ("loss, mean of the last steps", pages.number(mean_loss(record.lines))),
            ("trained for", pages.duration(record.total_seconds)),
            ("samples that could not be loaded", f"{len(record.lost):,}"),
            ("state", "trains" if is_training(run) else "rests"),
        ]
        curves, *rest = run_sections(record)
        curves = pages.Html(_TOO_FEW.sub("", curves))
        folded = pages.folded("data, time, settings, how to go on", pages.joined(rest))
        return box(_alarms(run), pages.tiles(figures), curves, folded)

    def samples(self, name: str) -> str:
        """Return the page of a run's validations: checkpoints by prompts, and two side by side."""
        from longtake.watch.page import write_page

        run = self.roots.path(name, "run")
        if not any((run / place).is_dir() for place in (VIDEOS, f"watch/{VIDEOS}")):
            raise UserError(f"{run.name}: has no samples; train it with validate_every, or run `longtake watch {run}`")
        return frame(write_page(run), "samples")

    def compared(self, name: str, other: str) -> str:
        from longtake.train.compare import write_comparison
        from longtake.train.report import read_record

        runs = [self.roots.path(one, "run") for one in (name, other)]
        page = self.roots.own / "pages" / "comparison.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        write_comparison(page, [read_record(run) for run in runs])
        return frame(page)

    def ask(self, name: str, what: str) -> str:
        from longtake.train.asking import ask_run

        return ask_run(self.roots.path(name, "run"), what)

    def go_on(self, name: str, steps: str | None) -> str:
        """Put a run's training on the queue, up to `steps` where there are some."""
        from longtake.train.asking import is_training
        from longtake.train.config import RunWithoutTable
        from longtake.train.run_file import read_run

        run, text = self.roots.path(name, "run"), (steps or "").strip()
        if is_training(run):
            raise UserError(f"{run}: trains already; stop it first")
        if not (run / CONFIG_FILE).is_file():
            raise UserError(f"{run}: is no run; choose one, or put a run file on the queue below")
        made = max((info.step for info in list_checkpoints(run) if info.complete), default=0)
        if text and not (re.fullmatch("[0-9]{1,9}", text) and int(text) > made):
            raise UserError(f"until step {text!r}: give a whole number above {made}, the step of the newest checkpoint")
        last = read_run(str(run), schema=RunWithoutTable).value.max_steps if text else None
        if last is not None and int(text) < last:
            raise UserError(
                f"until step {text}: below max_steps = {last} of the run, whose schedule would change; leave it empty "
                "to resume, and press Stop when it has trained enough"
            )
        further = ["--max-steps", text] if text and int(text) != last else []
        return self.queue.add("train", ["train", str(run), *further]).command

    def start(self, source: str) -> str:
        """Put a run file or preset on the queue."""
        if source not in {one.name for one in presets()}:
            source = str(self.roots.path(source, "run file"))
        return self.queue.add("train", ["train", source, "--outputs", str(self.roots.folders[0])]).command

    def sources(self) -> list[tuple[str, str]]:
        own = [path for path in self.roots.files((".py", ".toml")) if path.name != CONFIG_FILE]
        return self.roots.named(own) + [(one.name, one.name) for one in presets() if one.kind == "train"]

    def under_way(self) -> str:
        jobs = self.queue.jobs()
        running = [state(job) for job in jobs if job.state in ("running", "stopping")]
        return box(*running, queue_table(reversed(jobs[-_MOST_JOBS:])))

    def stoppable(self) -> list[tuple[str, str]]:
        found: list[QueuedCommand] = [job for job in self.queue.jobs() if not job.is_over]
        return [(f"{job.name} {job.state}: {job.command[:80]}", job.name) for job in found]

    def stamp(self, name: str) -> str:
        """Return a text that changes when a run has made steps, or the list of runs or the queue has changed."""
        try:
            made = int((self.roots.path(name) / METRICS_FILE).stat().st_mtime) // _SECONDS if name else 0
        except (UserError, OSError):
            made = 0
        jobs = [(job.name, job.state) for job in self.queue.jobs() if not job.is_over]
        return f"{name} {made} {jobs} {self.names()}"


def _with_alarms(name: str, run: Path) -> str:
    from longtake.watch.telling import read_alarms

    kinds = dict.fromkeys(alarm.kind for alarm in read_alarms(run))
    return f"{name} · ALARM: {', '.join(kinds)}" if kinds else name


def _alarms(run: Path) -> pages.Html:
    """Return the alarms that `longtake watch` has raised: since when, why, the fix, and the checkpoint to return to."""
    from longtake.watch.telling import read_alarms, way_back

    def shown(alarm: Alarm) -> pages.Html:
        about = f"{alarm.kind} of {alarm.subject}" if alarm.subject else alarm.kind
        said = pages.html(
            "<b>{} since step {}</b><br>{}<br>What to do: {}", about, alarm.step, alarm.reason, alarm.advice
        )
        back = way_back(run, alarm)
        if back is None:
            return pages.html('<div class="alarm">{}<br>No checkpoint is left from before it.</div>', said)
        place = pages.html("Go back to step {}: <code>{}</code>", *back)
        return pages.html('<div class="alarm">{}<br>{}</div>', said, place)

    return pages.joined(shown(alarm) for alarm in read_alarms(run))


def build(roots: Roots, queue: Queue) -> None:
    """Build the tab."""
    import gradio as gr

    runs = Runs(roots, queue)
    names = runs.names()
    with gr.Row():
        run = gr.Dropdown(
            names,
            value=names[0][1] if names else None,
            label="Run",
            allow_custom_value=True,
            elem_id="run",
            min_width=260,
        )
        other = gr.Dropdown(
            names, value=None, label="Compare with", allow_custom_value=True, elem_id="other", min_width=260
        )
    with gr.Row():
        words = ("sample", "save", "stop")
        wanted = {word: gr.Button(word.capitalize(), min_width=70, elem_id=f"ask_{word}") for word in words}
        go_on = gr.Button("Resume", min_width=70, variant="primary", elem_id="go_on")
        steps = gr.Textbox(label="until step", placeholder="max_steps of the run", min_width=80, elem_id="up_to")
    with gr.Row():
        samples = gr.Button("Samples by step", min_width=140, elem_id="samples")
        compare = gr.Button("Compare the two", min_width=140, elem_id="compare")
    page = gr.HTML(elem_id="run_page")
    now = gr.HTML(lambda: runs.shown(names[0][1] if names else ""), elem_id="curves")
    jobs, job, stop, source, start = _queue_fields(runs)
    seen = gr.State("")

    def tick(name: str, last: str) -> tuple[Any, ...]:
        stamp = runs.stamp(name)
        if stamp == last:
            return gr.skip(), runs.under_way(), gr.skip(), gr.skip(), gr.skip(), last
        found = runs.names()
        chosen = name or (found[0][1] if found else None)
        listed = gr.update(choices=found, value=chosen), gr.update(choices=found)
        return runs.shown(chosen or ""), runs.under_way(), *listed, gr.update(choices=runs.stoppable()), stamp

    for what, button in wanted.items():
        asked = told(lambda name, what=what: gr.Info(runs.ask(name, what)))
        button.click(asked, run, None, show_progress="hidden")
    go_on.click(told(lambda name, to: gr.Info(runs.go_on(name, to))), [run, steps], None, show_progress="hidden")
    run.change(runs.shown, run, now, show_progress="hidden")
    samples.click(told(runs.samples), run, page)
    compare.click(told(runs.compared), [run, other], page)
    stop.click(lambda name: gr.Info(queue.stop(name or "")), job, None, show_progress="hidden")
    start.click(told(lambda text: gr.Info(runs.start(text or ""))), source, None, show_progress="hidden")
    gr.Timer(2).tick(tick, [run, seen], [now, jobs, run, other, job, seen], show_progress="hidden")
    clear_on_change([run, other], [page])  # of another run, or an error
    clear_on_change([run], [steps])
    keep_fresh(source, runs.sources)


def _queue_fields(runs: Runs) -> tuple[Any, Any, Any, Any, Any]:
    """Return the queue, the command of it to stop and its button, and what to put on it and its button."""
    import gradio as gr

    gr.Markdown("### Queue")
    jobs = gr.HTML(runs.under_way, elem_id="queue")
    with gr.Row():
        job = gr.Dropdown(
            runs.stoppable(), value=None, label="A command of the queue", allow_custom_value=True, scale=3
        )
        stop = gr.Button("Stop it", variant="stop", scale=1)
    with gr.Row():
        source = gr.Dropdown(runs.sources(), value=None, label="Run file or preset", allow_custom_value=True, scale=3)
        start = gr.Button("Put on the queue", scale=1)
    return jobs, job, stop, source, start
