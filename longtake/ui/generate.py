"""The tab that makes videos: a form, its command line, the forecast of its needs, and the finished videos."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from longtake import pages
from longtake.contracts import UserError
from longtake.generate.sample import shape_asked
from longtake.presets import presets
from longtake.ui.queue import Queue, QueuedCommand
from longtake.ui.roots import Roots
from longtake.ui.shown import box, keep_fresh, media, mistake, state, told
from longtake.ui.uploads import remove_unused

if TYPE_CHECKING:
    from longtake.generate.source import GenerationSource

_SAMPLING = ("resolution", "aspect_ratio", "num_frames", "num_steps", "guidance", "seed")
FIELDS = ("model", "prompt", "negative", "ref", "lora", "lora_scale", "lora_more", "num_sample", *_SAMPLING)
_MOST_MADE = 24
_WIDTH_TO_HEIGHT, _HEIGHT_TO_WIDTH = "Width : height", "Height : width"
_SUFFIXES = (".mp4", ".png")


def flag(name: str, value: object) -> list[str]:
    """Return a flag that means this value, whatever is in it: text that a command line would take for something else
    stands in quotes of its own."""
    text = str(value)
    bare = text.strip().lower()
    taken = text.startswith("-") or not bare or bare in ("none", "null")
    if not taken and not bare.startswith(("[", "(", "{", '"', "'", "dict(", "list(", "tuple(")):
        return [f"--{name}", text]
    return [f"--{name}={text!r}"]


def words_of(form: Mapping[str, Any], roots: Roots, folder: Path) -> list[str]:
    """Return the command line behind `longtake` of a filled-in form. Raises `UserError` for what is missing
    or outside."""
    model = roots.model(form["model"])
    words = ["generate", model, *flag("prompt", _prompt(form))]
    if form["negative"]:
        words += flag("negative-prompt", form["negative"])
    if form["ref"]:
        kind = _source(model).config.kind_of_first_frame
        if kind is None:
            raise UserError(f"{model}: takes no first frame; leave the image out, or choose another model")
        words += [*flag("cond-type", kind), *flag("ref", roots.path(form["ref"], "image"))]
    if form["lora"]:
        words += flag("lora", roots.path(form["lora"], "LoRA"))
    if form["lora"] or form["lora_scale"] not in (None, 1):
        words += ["--lora-scale", f"{form['lora_scale'] or 0:g}"]
    if form["lora_more"]:
        words += ["--lora-more", repr(list(_more_adapters(roots, form["lora_more"]).items()))]
    for name in (*_SAMPLING, "num_sample"):
        text = "" if form[name] is None else str(form[name]).strip()
        if text and (name, text) != ("num_sample", "1"):
            words += flag(name.replace("_", "-"), text)
    return [*words, "--save-dir", str(folder)]


def _prompt(form: Mapping[str, Any]) -> str:
    if not (text := (form["prompt"] or "").strip()):
        raise UserError("prompt: is missing; say what the video shows")
    return text


def _source(model: str, words: tuple[str, ...] = ()) -> GenerationSource:
    from longtake.generate.source import resolve_source
    from longtake.presets import run_file

    return resolve_source(run_file(model, "inference"), list(words))


def usual(model: str) -> dict[str, str]:
    """Return the size, steps and guidance that a model's videos have where nothing else is said."""
    option = _source(model).config.sampling_option
    found = {name: getattr(option, name) for name in _SAMPLING if name != "seed"}
    return {name: f"{value:g}" if isinstance(value, float) else str(value or "") for name, value in found.items()}


def looked_at(words: list[str], roots: Roots, jobs: list[QueuedCommand]) -> tuple[GenerationSource, pages.Html]:
    """Return the generation that a command line requests, checked as the command does before a model is built, and its
    forecast."""
    from longtake.generate.checks import check_request
    from longtake.generate.requests import prompts_of

    source = _source(words[1], tuple(words[2:]))
    for file in (file for prompt in prompts_of(source.config) for file in prompt.refs):
        roots.path(str(Path(file).absolute()), "reference")  # which the words of a prompt may name, in Open-Sora 1.2
    doubts = [*source.notes, *check_request(source.config)]
    option = source.config.sampling_option
    frames = "1 frame" if option.num_frames == 1 else f"{option.num_frames} frames"
    seconds = option.num_frames / source.config.fps_save
    size = f"{option.resolution} {option.aspect_ratio}, {frames}"
    size += f" ({pages.duration(seconds)})" if option.num_frames > 1 else ""
    facts = [("video", f"{size}, {option.num_steps} steps"), *_needs(source)]
    if (earlier := _like(source, jobs)) is not None:
        facts.append(("measured here", f"{pages.duration(earlier.seconds())} for {earlier.name}, of the same size"))
    lines = pages.joined(pages.html('<p class="said">{}</p>', line) for line in doubts)
    return source, pages.joined([pages.pairs(facts), lines])


def _needs(source: GenerationSource) -> list[tuple[str, str]]:
    """Return the forecast of time and memory: of the GPU that is here, or where none is of an H200."""
    from longtake.plan.video import forecast_videos, machine_named

    config, machine = source.config, machine_named(None)
    found = forecast_videos(config, machine, 1, config.num_sample)
    parts = ", ".join(f"{name} {pages.duration(seconds)}" for name, seconds in found.parts.items() if seconds > 0.1)
    own, parts = machine.gpu.memory_gib, f" ({parts})" if parts else ""
    held, seconds = found.bytes / 2**30, found.seconds
    held_words = f"{held:.3g}" if held >= 0.1 else "less than 0.1"
    memory = f"{held_words} of {own:g} GiB" + (": too large" if found.bytes > machine.usable_bytes else "")
    return [
        ("forecast for", f"one {machine.gpu.name}" + ("" if torch.cuda.is_available() else "; no GPU is here")),
        ("time", f"{pages.duration(seconds) if seconds >= 1 else 'less than 1 s'}{parts}, and loading"),
        ("memory", memory),
    ]


def _like(source: GenerationSource, jobs: list[QueuedCommand]) -> QueuedCommand | None:
    """Return the last generation of as many videos of this size and of as many steps by this model."""
    asked = settings_of(source)
    alike = ("model", "resolution", "aspect_ratio", "num_frames", "num_steps", "num_sample")
    for job in reversed(jobs):
        made = job.about.get("settings", {})
        if job.state == "done" and all(made.get(key) == asked.get(key) for key in alike):
            return job
    return None


def _more_adapters(roots: Roots, text: str) -> dict[str, float]:
    """File -> strength of the lines of a text. Raises `UserError` for a line without a number at its end."""
    found = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        name, _, number = line.rpartition(" ")
        try:
            strength = float(number)
        except ValueError:
            strength = math.nan
        if not (name and math.isfinite(strength)):
            raise UserError(f"more LoRA files: {line!r} has no strength at its end; write {name or line} 0.5")
        found[str(roots.path(name, "LoRA"))] = strength
    return found


def settings_of(source: GenerationSource) -> dict[str, Any]:
    """Return all settings that determine a video, as resolved."""
    config = source.config
    shown = {
        "model": str(source.checkpoint or config.model.from_pretrained or config.model.type),
        "prompt": config.prompt,
        "negative_prompt": config.negative_prompt,
        "known frames": config.cond_type,
        "ref": config.ref,
        "lora": None if config.lora is None else config.lora.from_pretrained,
        "lora_scale": None if config.lora is None else config.lora.strength,
        "lora_more": None if config.lora is None else config.lora.more or None,
        **config.sampling_option.model_dump(mode="json"),
        "num_sample": config.num_sample,
        "fps": config.fps_save,
        "dtype": config.dtype,
        "averaged weights": config.ema,
    }
    return {key: value for key, value in shown.items() if value not in (None, "", {})}


def videos_of(job: QueuedCommand) -> list[tuple[Path, str]]:
    """Return the videos that a command has made, each with its seed."""
    folder, log = Path(job.about.get("folder", job.folder)), job.log()
    files = sorted(path for path in folder.rglob("*") if path.suffix in _SUFFIXES and path.with_suffix(".txt").exists())
    seeds = ((path, re.search(re.escape(str(path)) + r"\s+seed (\d+)", log)) for path in files)
    return [(path, found[1] if found else "") for path, found in seeds]


def gallery(jobs: list[QueuedCommand]) -> str:
    """Return the videos of all generations, the newest first, each with its settings and its command."""
    cards = []
    for job in reversed([job for job in jobs if job.kind == "generate"]):
        for path, seed in videos_of(job):
            rows = [("seed of this one", seed), *job.about.get("settings", {}).items()]
            text = path.with_suffix(".txt").read_text("utf-8", "replace").strip()
            whole = pages.html("<pre>{}</pre>{}", job.command, pages.pairs([(key, str(value)) for key, value in rows]))
            own = f" · seed {seed}" if seed else ""  # the log has none of a video that its command made again
            said = pages.html('<p>{}</p><p class="said">{}{}</p>', text, job.name, own)
            parts = [media(path, text), said, pages.folded("settings and command", whole)]
            cards.append(pages.html("<div>{}</div>", pages.joined(parts)))
    if not cards:
        return box(pages.html('<p class="said">Videos appear here, each with its settings and its command.</p>'))
    return box(pages.html('<div class="made">{}</div>', pages.joined(cards[:_MOST_MADE])))


class VideoForm:
    """Handlers of the form, apart from its layout."""

    def __init__(self, roots: Roots, queue: Queue):
        self.roots, self.queue = roots, queue

    def _form(self, values: tuple[Any, ...]) -> dict[str, Any]:
        return dict(zip(FIELDS, values, strict=True))

    def _folder(self) -> Path:
        taken = [int(job.name) for job in self.queue.jobs()]
        return self.roots.own / "videos" / f"{max(taken, default=0) + 1:04d}"

    def preview(self, *values: Any) -> tuple[str, str]:
        """Return the command line of the form, and what it will take or what is wrong with it."""
        form = self._form(values)
        if not form["model"] or not (form["prompt"] or "").strip():
            return "", box(pages.html('<p class="said">Choose a model and write a prompt.</p>'))
        try:
            words = words_of(form, self.roots, self._folder())
            _, facts = looked_at(words, self.roots, self.queue.jobs())
        except (UserError, OSError) as error:
            return "", mistake(error)
        return QueuedCommand(Path(), "generate", tuple(words)).command, box(facts)

    def ask(self, *values: Any) -> str:
        """Put the form's command on the queue: with a seed, and the very checkpoint, so that it can be repeated."""
        form = self._form(values)
        if form["seed"] in (None, ""):
            form["seed"] = random.randrange(2**31)
        folder = self._folder()
        words = words_of(form, self.roots, folder)
        source, _ = looked_at(words, self.roots, [])
        if source.checkpoint is not None:
            words[1] = str(source.checkpoint)
        about = {"form": {**form, "seed": str(form["seed"])}, "settings": settings_of(source), "folder": str(folder)}
        return self.queue.add("generate", words, about).name

    def usual(self, model: str) -> list[Any]:
        """Return the default values of the form's size fields for a model."""
        found = usual(self.roots.model(model)) if model else {}
        return [found.get(name) for name in _SAMPLING if name != "seed"]

    def ratio_label(self, model: str) -> str:
        """Return the label of a model's ratios: the tables of some systems have height to width."""
        try:
            config = _source(self.roots.model(model)).config
            option = config.sampling_option
            _, height, width = shape_asked(config, option)
            first, _, second = str(option.aspect_ratio).partition(":")
            ratio = float(first) / float(second or 1)
        except (UserError, OSError, ValueError, ZeroDivisionError):
            return _WIDTH_TO_HEIGHT
        exact = re.fullmatch(r"\d+x\d+", str(option.resolution)) is not None  # the ratio is not read then
        upright = not exact and abs(ratio - height / width) < abs(ratio - width / height)
        return _HEIGHT_TO_WIDTH if upright else _WIDTH_TO_HEIGHT

    def now(self) -> str:
        jobs = [job for job in self.queue.jobs() if job.kind == "generate"]
        under_way = [job for job in jobs if not job.is_over] or jobs[-1:]
        return box(*(state(job) for job in under_way))

    def again(self, name: str) -> list[Any]:
        """Return the fields of the form as an earlier generation had them."""
        job = self.queue.job(name or "")
        if job is None:
            raise UserError("settings: choose a generation first")
        return [job.about["form"].get(field) for field in FIELDS]

    def earlier(self) -> list[tuple[str, str]]:
        found = [job for job in self.queue.jobs() if job.kind == "generate"]
        return [(f"{job.name} {job.about.get('form', {}).get('prompt', '')[:60]}", job.name) for job in reversed(found)]

    def choices(self) -> list[tuple[str, str]]:
        return self.roots.named(self.roots.models()) + [
            (one.name, one.name) for one in presets() if one.kind == "inference"
        ]

    def adapters(self) -> list[tuple[str, str]]:
        return self.roots.named(self.roots.files((".safetensors",)))


def build(roots: Roots, queue: Queue) -> None:
    """Build the tab."""
    import gradio as gr

    form = VideoForm(roots, queue)
    with gr.Row():
        with gr.Column(scale=3, min_width=320):
            fields, image = _fields(form)
        with gr.Column(scale=2, min_width=320):
            needs = gr.HTML(elem_id="needs")
            command = gr.Textbox(label="Command", lines=2, max_lines=8, interactive=False, buttons=["copy"])
            with gr.Row():
                make = gr.Button("Generate", variant="primary", elem_id="make")
                stop = gr.Button("Cancel", variant="stop", elem_id="cancel")
            current, shown = gr.State(""), gr.State("")
            now = gr.HTML(form.now, elem_id="now")
    made = gr.HTML(lambda: gallery(queue.jobs()), elem_id="made")
    with gr.Row():
        earlier = gr.Dropdown(
            form.earlier(), value=None, label="An earlier generation", allow_custom_value=True, scale=3
        )
        take = gr.Button("Take its settings", scale=1)

    def tick(last: str) -> tuple[Any, ...]:
        jobs = queue.jobs()
        done = str([job.name for job in jobs if job.is_over])
        if done == last:  # films would begin anew
            return form.now(), gr.skip(), gr.skip(), last
        return form.now(), gallery(jobs), gr.update(choices=form.earlier()), done

    def cancel(name: str) -> None:
        under_way = [job for job in queue.jobs() if job.kind == "generate" and not job.is_over]
        chosen = next((job for job in under_way if job.name == name), under_way[0] if under_way else None)
        gr.Info(queue.stop(chosen.name) if chosen else "nothing is under way")
        remove_unused(roots.uploads, queue.jobs())

    every = [fields[name] for name in FIELDS]
    sizes = [fields[name] for name in _SAMPLING if name != "seed"]
    image.upload(lambda path: path, image, fields["ref"], show_progress="hidden")
    image.clear(lambda: "", None, fields["ref"], show_progress="hidden")
    fields["model"].input(told(form.usual), fields["model"], sizes, show_progress="hidden")
    ratio = fields["aspect_ratio"]
    fields["model"].change(
        lambda model: gr.update(label=form.ratio_label(model)), fields["model"], ratio, show_progress="hidden"
    )
    changes = [field.change for field in every]
    gr.on(changes, form.preview, every, [command, needs], trigger_mode="always_last", show_progress="hidden")
    make.click(told(form.ask), every, current, show_progress="hidden")
    stop.click(cancel, current, None, show_progress="hidden")
    take.click(told(form.again), earlier, every, show_progress="hidden")
    gr.Timer(1).tick(tick, shown, [now, made, earlier, shown], show_progress="hidden")
    keep_fresh(fields["model"], form.choices)
    keep_fresh(fields["lora"], form.adapters)


def _fields(form: VideoForm) -> tuple[dict[str, Any], Any]:
    """Return the fields of the form by their names, and the upload of a first frame."""
    import gradio as gr

    choices = form.choices()
    try:
        first = form.usual(choices[0][1])
    except UserError:  # its own faults are said when it is chosen
        first = [None] * 5
    made: dict[str, Any] = {}
    about = "a run, a checkpoint, an exported file or a preset"
    made["model"] = gr.Dropdown(choices, label="Model", info=about, allow_custom_value=True, elem_id="model")
    made["prompt"] = gr.Textbox(label="Prompt", lines=3, elem_id="prompt", placeholder="what the video shows")
    made["negative"] = gr.Textbox(label="Negative prompt", elem_id="negative")
    with gr.Accordion("First frame and LoRA", open=False):
        image = gr.File(label="Upload an image", file_types=["image"], height=110, elem_id="image")
        made["ref"] = gr.Textbox(label="First frame", info="a path inside the page's folders", elem_id="ref")
        made["lora"] = gr.Dropdown(form.adapters(), value=None, label="LoRA file", allow_custom_value=True)
        made["lora_scale"] = gr.Slider(0, 2, 1, step=0.05, label="LoRA strength")
        about = "a line each: a file, a blank, its strength"
        made["lora_more"] = gr.Textbox(label="More LoRA files", info=about, lines=2, elem_id="lora_more")
    with gr.Row():
        made["resolution"] = gr.Textbox(first[0], label="Size", min_width=90, elem_id="resolution")
        made["aspect_ratio"] = gr.Textbox(
            first[1], label=form.ratio_label(choices[0][1]) if choices else _WIDTH_TO_HEIGHT, min_width=90
        )
        made["num_frames"] = gr.Textbox(first[2], label="Frames", min_width=90, elem_id="frames")
    with gr.Row():  # no fields for numbers: to Gradio an empty one of those is 0
        made["num_steps"] = gr.Textbox(first[3], label="Steps", min_width=90, elem_id="steps")
        made["guidance"] = gr.Textbox(first[4], label="Guidance", min_width=90, elem_id="guidance")
        made["seed"] = gr.Textbox(label="Seed", placeholder="random", min_width=90, elem_id="seed")
        made["num_sample"] = gr.Textbox("1", label="Videos", min_width=90, elem_id="videos")
    return made, image
