"""The tab of data: what is in a table and how a run's buckets take it, its clips with captions to edit, and what could
not be read, with the reasons."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longtake import pages
from longtake.contracts import UserError
from longtake.data.clips.caption_files import CAPTION_SUFFIX, CaptionFiles
from longtake.data.clips.locations import join_location
from longtake.data.tables.rows import FOLDER_TABLE, open_rows
from longtake.durable import write_whole
from longtake.presets import presets, run_file
from longtake.train.folder import QUARANTINE_FILE
from longtake.train.run_file import CONFIG_FILE
from longtake.ui.roots import Roots
from longtake.ui.shown import box, clear_on_change, frame, keep_fresh, media, told

SHOWN = 6  # clips at once
_TABLES = (".csv", ".parquet", ".jsonl", ".arrow")
_MOST_LOST = 200
_CACHE_BYTES = 20 * 10**9


class Clips:
    """Handlers of the tab Data."""

    def __init__(self, roots: Roots):
        self.roots = roots

    def tables(self) -> list[tuple[str, str]]:
        """Roots with clips, tables, and folders read as one; not what runs, probes and this page write."""
        found = [path for path in self.roots.files(_TABLES) if not (path.parent / CONFIG_FILE).exists()]
        own = [path for path in found if not path.name.endswith(".bad.csv") and self.roots.own not in path.parents]
        own = [path.parent if path.name == FOLDER_TABLE else path for path in own]
        return self.roots.named(dict.fromkeys([*self.roots.clip_folders(), *own]))

    def runs(self) -> list[tuple[str, str]]:
        """Run, and presets that train: what has buckets."""
        own = self.roots.named(self.roots.runs())
        return own + [(one.name, one.name) for one in presets() if one.kind == "train"]

    def report(self, table: str, run: str | None) -> str:
        """Return the page of `longtake data stats --html`, with the buckets of a run."""
        from longtake.data.clips.file_cache import FileCache, default_cache_folder
        from longtake.data.tables.mix import table_and_root
        from longtake.data.tables.stats import table_stats
        from longtake.data.tables.stats_page import film_reader, stats_page
        from longtake.data.tables.table import base_folder

        source, start = table_and_root(self.roots.path(table, "table"), None)
        found = table_stats(source, examples=12)
        buckets = None
        if run:
            from longtake.train.preview import preview_buckets, read_previewed

            preset = run in {one.name for one in presets()}
            own = run_file(run) if preset else str(self.roots.path(run, "run"))
            buckets = preview_buckets(read_previewed(own, source), source).picture()
        start = found.folder if start is None else base_folder(source, start)
        cache = FileCache(default_cache_folder(), _CACHE_BYTES)
        page = self.roots.own / "pages" / "data.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        write_whole(page, stats_page(found, film_reader(start, cache), buckets))
        return frame(page)

    def clips(self, table: str) -> list[tuple[str, str]]:
        """(where a clip lies, its caption) of every row."""
        from longtake.data.tables.mix import table_and_root
        from longtake.data.tables.table import base_folder

        source, start = table_and_root(self.roots.path(table, "table"), None)
        columns, _ = open_rows(source, as_text=source.suffix.lower() == ".csv").whole()
        if "path" not in columns.column_names:
            raise UserError(f"{source}: has no column path; its columns are {', '.join(columns.column_names)}")
        place = base_folder(source, start)
        paths = [str(path) for path in columns.column("path").to_pylist()]
        there = "text" in columns.column_names
        texts = columns.column("text").to_pylist() if there else [""] * len(paths)
        return [(join_location(place, path), text or "") for path, text in zip(paths, texts, strict=True)]

    def browse(self, table: str, word: str, first: float) -> tuple[str, int, list[tuple[str, str]]]:
        """Return a line on what is shown, the first that is, and the clips, some whose caption or path has `word`."""
        every = self.clips(table)
        found = [clip for clip in every if not word or word.lower() in f"{clip[0]} {clip[1]}".lower()]
        first = max(0, min(int(first), (len(found) - 1) // SHOWN * SHOWN))
        last = min(first + SHOWN, len(found))
        said = f"{first + 1 if found else 0} to {last} of {len(found):,} clips, {len(every):,} in the table"
        return said, first, found[first:last]

    def film(self, location: str) -> str:
        try:
            return box(
                media(self.roots.path(location, "clip")), pages.html('<p class="said">{}</p>', Path(location).name)
            )
        except UserError as error:
            return box(pages.html('<p class="bad">{}</p>', error))

    def save(self, table: str, shown: Sequence[Sequence[str]], texts: Sequence[str]) -> str:
        """Write the captions that were changed, as `longtake data captions` does."""
        from longtake.data.tables.captions import edit_captions

        source = self.roots.path(table, "table")
        new = _changed(shown, texts)
        if source.is_dir():  # of a folder of clips the captions lie beside them
            for (where, _), text in new.items():
                clip = self.roots.path(where, "clip")
                write_whole(CaptionFiles().find(clip) or clip.with_suffix(CAPTION_SUFFIX), text + "\n")
            return f"{_captions(len(new))} changed in {source}" if new else "no caption was changed"
        changed, rows = edit_captions(source, [lambda where, text: new.get((where, text), text)]) if new else (0, 0)
        return f"{changed:,} of {rows:,} captions changed in {source}" if changed else "no caption was changed"

    def lost(self) -> str:
        """Return the clips that runs and probes could not read, with the reasons."""
        rows, unread = [], []
        for path in (*(run / QUARANTINE_FILE for run in self.roots.runs()), *self.roots.files((".bad.csv",))):
            try:
                rows += _lost_in(path)
            except (UserError, OSError) as error:  # a list that cannot be read hides no other
                unread.append(pages.html('<p class="bad">{}</p>', error))
        if not rows:
            return box(*unread, pages.html('<p class="said">Every clip could be read so far.</p>'))
        cut = f"The first {_MOST_LOST} of {len(rows):,}." if len(rows) > _MOST_LOST else ""
        shown = pages.table(("clip", "reason", "where"), rows[:_MOST_LOST], words=(0, 1, 2))
        return box(*unread, shown, pages.html('<p class="said">{}</p>', cut))


def _lost_in(path: Path) -> list[tuple[str, str, str]]:
    """(clip, reason, where) of what a run's quarantine or a probe's list of bad files has."""
    if path.name == QUARANTINE_FILE:
        from longtake.data.loading.quarantine import list_quarantine

        run = path.parent.name
        return [(one.path, one.reason, f"{run}, pass {one.pass_index}") for one in list_quarantine(path)]
    columns, _ = open_rows(path, as_text=True).whole()
    if not {"path", "reason"} <= set(columns.column_names):
        raise UserError(f"{path}: has no columns path and reason; it was written by no probe")
    where = f"{path.parent.name}/" if path.name.startswith(".") else path.name  # the hidden list of a folder of clips
    return [(row["path"], row["reason"], where) for row in columns.to_pylist()]


def _changed(shown: Sequence[Sequence[str]], texts: Sequence[str]) -> dict[tuple[str, str], str]:
    """(where a clip lies, its caption) -> what was written over it."""
    pairs = zip(shown, texts, strict=False)
    return {(where, old): text.strip() for (where, old), text in pairs if text.strip() != old}


def _captions(count: int) -> str:
    return "1 caption" if count == 1 else f"{count:,} captions"


def build(roots: Roots) -> None:
    """Build the tab."""
    import gradio as gr

    clips = Clips(roots)
    tables = clips.tables()
    with gr.Row():
        own = tables[0][1] if tables else None
        words = {"allow_custom_value": True, "scale": 3, "min_width": 260}
        table = gr.Dropdown(tables, value=own, label="Table, or folder of clips", elem_id="table", **words)
        run = gr.Dropdown(clips.runs(), value=None, label="Buckets of a run or preset", elem_id="bucket_run", **words)
        report = gr.Button("Report", scale=1, elem_id="report", variant="primary")
    page = gr.HTML(elem_id="data_page")
    gr.Markdown("### Clips and captions")
    with gr.Row():
        word = gr.Textbox(label="Search captions and names", scale=2, min_width=140, elem_id="word")
        show = gr.Button("Show", min_width=80, elem_id="show")
        back = gr.Button("Previous", min_width=80)
        on = gr.Button("Next", min_width=80, elem_id="next")
        save = gr.Button("Save captions", variant="primary", min_width=140, elem_id="save")
    said = gr.Markdown(elem_id="clips_said")
    films, texts = _boxes()
    gr.Markdown("### What could not be read")
    lost = gr.HTML(clips.lost, elem_id="lost")
    first, shown = gr.State(0), gr.State([])

    def browse(name: str, text: str, at: float) -> list[Any]:
        words, at, found = clips.browse(name, text, at)
        more = SHOWN - len(found)
        filled = [clips.film(where) for where, _ in found] + [""] * more
        captions = [gr.update(value=caption, visible=True) for _, caption in found] + [gr.update(visible=False)] * more
        return [words, at, found, *filled, *captions]

    def kept(name: str, there: list[list[str]], text: str, at: float, *written: str) -> list[Any]:
        gr.Info(clips.save(name, there, written[: len(there)]))
        return browse(name, text, at)

    def turned(by: int, name: str, there: list[list[str]], text: str, at: float, *written: str) -> list[Any]:
        if count := len(_changed(there, written[: len(there)])):
            raise UserError(f"{_captions(count)} not saved: Save captions keeps what was written, Show drops it")
        return browse(name, text, at + by)

    outcome = [said, first, shown, *films, *texts]
    report.click(told(clips.report), [table, run], page)
    show.click(told(lambda name, text: browse(name, text, 0)), [table, word], outcome, show_progress="hidden")
    for button, move in ((back, -SHOWN), (on, SHOWN)):
        moved = told(functools.partial(turned, move))
        button.click(moved, [table, shown, word, first, *texts], outcome, show_progress="hidden")
    save.click(told(kept), [table, shown, word, first, *texts], outcome, show_progress="hidden")
    report.click(clips.lost, None, lost, show_progress="hidden")
    clear_on_change([table, run], [page])  # of another table, or an error
    keep_fresh(table, clips.tables)
    keep_fresh(run, clips.runs)
    gr.on(None, clips.lost, None, lost, show_progress="hidden")


def _boxes() -> tuple[list[Any], list[Any]]:
    """Return the places of the clips that are shown at once, and of their captions."""
    import gradio as gr

    films, texts = [], []
    for _ in range(SHOWN // 3):
        with gr.Row():
            for _ in range(3):
                with gr.Column(min_width=280):
                    films.append(gr.HTML(elem_classes="clip"))
                    texts.append(gr.Textbox(label="Caption", lines=2, visible=False, elem_classes="caption"))
    return films, texts
