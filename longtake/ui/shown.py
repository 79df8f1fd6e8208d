"""Shared parts of the tabs: errors shown in the page, parts of pages, and the state of a command."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from longtake import pages
from longtake.contracts import UserError
from longtake.ui.queue import QueuedCommand

_FRESH_SECONDS = 10  # between two looks at the folders


def told(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Return a handler whose user's mistakes appear in the page as the sentence that the command line would print."""

    @functools.wraps(handler)
    def run(*values: Any) -> Any:
        import gradio as gr

        try:
            return handler(*values)
        except (UserError, OSError) as error:
            raise gr.Error(pages.html("{}", error), duration=20, print_exception=False) from None

    return run


def keep_fresh(field: Any, choices: Callable[[], Any]) -> None:
    """List `choices` when the page is opened and every few seconds, where they have changed."""
    import gradio as gr

    listed = gr.State(None)

    def update(last: Any) -> tuple[Any, Any]:
        present = choices()
        return (gr.skip() if present == last else gr.update(choices=present)), present

    gr.Timer(_FRESH_SECONDS).tick(update, listed, [field, listed], show_progress="hidden")
    gr.on(None, update, listed, [field, listed], show_progress="hidden")


def clear_on_change(fields: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Empty `outputs`, which belong to the values of `fields`, when one of these has another value.

    A field also reports a change when its list of choices is refreshed; that clears nothing.
    """
    import gradio as gr

    seen = gr.State(None)

    def clear(last: str | None, *values: Any) -> tuple[Any, ...]:
        content = gr.skip() if last == repr(values) else ""
        return *(content for _ in outputs), repr(values)

    changes = [field.change for field in fields]
    gr.on(changes, clear, [seen, *fields], [*outputs, seen], show_progress="hidden")


def box(*parts: object) -> str:
    """Parts of a page in Longtake's style."""
    return str(pages.html('<div class="lt">{}</div>', pages.joined(parts)))


def mistake(error: object) -> str:
    return box(pages.html('<p class="bad">{}</p>', error))


def media(path: Path, title: str = "") -> pages.Html:
    """Return a video or still of the roots."""
    source = f"/media?path={quote(str(path))}"
    if path.suffix.lower() in (".png", ".jpg", ".jpeg", ".webp", ".gif"):
        return pages.html('<img src="{}" alt="{}" loading="lazy">', source, title)
    words = '<video src="{}" title="{}" controls autoplay loop muted playsinline preload="metadata"></video>'
    return pages.html(words, source, title)


def frame(path: Path, place: str = "") -> str:
    """Return a whole page that Longtake has written, inside this one, from the heading `place` on."""
    words = '<iframe class="page" src="/page?path={}&amp;v={}#{}"></iframe>'
    return str(pages.html(words, quote(str(path)), path.stat().st_mtime_ns, place))


def state(job: QueuedCommand) -> pages.Html:
    """Return the state of a command: its progress, time and the end of its output."""
    done = job.progress()
    head = pages.html(
        '<p><span class="state {}">{}</span> <b>{}</b> {} {}</p>',
        *(job.state, job.state, job.kind, job.name, pages.duration(job.seconds()) if job.started else ""),
    )
    bar = pages.joined([])
    if done and not job.is_over and done[1]:
        bar = pages.meter(min(1.0, done[0] / done[1]), f"{done[0]:g} / {done[1]:g}")
    log = [line for line in job.log().strip().splitlines() if not line.endswith(" videos")]  # the bar says these
    end = pages.html("<pre>{}</pre>", "\n".join(log[-12:])) if log else pages.joined([])
    if job.state == "done":
        end = pages.folded("what it printed", end)
    return pages.joined([head, bar, pages.html('<p class="said"><code>{}</code></p>', job.command), end])


def queue_table(jobs: Iterable[QueuedCommand]) -> pages.Html:
    rows = [
        (
            job.name,
            pages.html('<span class="state {}">{}</span>', job.state, job.state),
            pages.duration(job.seconds()) if job.started else "",
            pages.html("<code>{}</code>{}", job.command, _why(job)),
        )
        for job in jobs
    ]
    return pages.table(("", "state", "time", "command"), rows, words=(0, 1, 3)) if rows else _nothing()


def _why(job: QueuedCommand) -> pages.Html:
    """Return the reason of a command that failed: the last that it printed."""
    lines = job.log().split("\n") if job.state == "failed" else []
    last = next((line for line in reversed(lines) if line.strip()), "")
    return pages.html('<p class="bad">{}</p>', last) if last else pages.joined([])


def _nothing() -> pages.Html:
    return pages.html('<p class="said">Nothing has been asked for yet.</p>')
