"""`longtake ui`: the page put together, the files it may serve, and the server."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from longtake import pages
from longtake.contracts import UserError
from longtake.ui.gate import LOOPBACK, Gate, token_for
from longtake.ui.queue import Queue
from longtake.ui.roots import MalformedPath, Roots
from longtake.ui.uploads import MAX_UPLOAD_BYTES, Uploads, remove_unused

_MEDIA = (".mp4", ".webm", ".mov", ".mkv", ".avi", ".png", ".jpg", ".jpeg", ".webp", ".gif")
_EVERYWHERE = ("", "0.0.0.0", "::")
_STYLE = """
.gradio-container{max-width:1180px!important;width:100%!important;margin:auto!important}
.tabs,.tabitem{width:100%}
footer{display:none!important}
.made{display:grid;gap:1rem;grid-template-columns:repeat(auto-fill,minmax(min(17rem,100%),1fr))}
.made>div{border:1px solid var(--line);border-radius:10px;padding:.6rem;background:var(--card);min-width:0}
.made video,.made img{width:100%;border-radius:6px;background:#000;max-height:22rem;
object-fit:contain}
.clip video,.clip img{width:100%;height:10rem;object-fit:contain;background:#8882;border-radius:6px;
image-rendering:pixelated}
.said{color:var(--soft);font-size:.88rem}
.lt pre{max-height:16rem;overflow:auto}
.lt table,.lt tr,.lt th,.lt td{border-width:0!important;font-size:.92rem}
.lt th,.lt td{border-bottom:1px solid var(--line)!important;padding:.3rem .8rem .3rem 0!important}
.lt td:first-child{white-space:nowrap;color:var(--soft)}
.lt .state{display:inline-block;border-radius:1rem;padding:0 .6rem;font-size:.82rem;background:var(--line)}
.lt .state.running{background:var(--accent);color:#fff}.lt .state.failed{background:var(--bad);color:#fff}
.lt .alarm{border-left:4px solid var(--bad);padding:.4rem .8rem;margin:.6rem 0;overflow-wrap:anywhere}
.lt .alarm b{color:var(--bad)}
iframe.page{width:100%;height:80vh;border:1px solid #8885;border-radius:10px;background:#fff}
"""


def serve(
    folders: Sequence[Path], host: str = "127.0.0.1", port: int = 7860, token: str | None = None,
    say: Callable[[str], object] = print,
) -> None:  # fmt: skip
    """Serve the page until an interrupt. Raises `UserError` where Gradio is missing, or the port or the queue's folder
    is taken."""
    roots, token = Roots.of(folders), token_for(host, token)
    os.environ |= {
        "GRADIO_ANALYTICS_ENABLED": "False",
        "GRADIO_TEMP_DIR": str(roots.uploads),
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    try:
        import uvicorn
        from fastapi import FastAPI
        from gradio import mount_gradio_app
        from starlette.responses import FileResponse, PlainTextResponse
    except ImportError as error:
        raise UserError(
            f"ui: {error.name or 'gradio'} is not installed; pip install '.[ui]' in Longtake's folder"
        ) from None
    queue, place = Queue(roots.own / "queue"), _listen(host, port)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/media")
    def media(path: str) -> Any:
        return _served(roots, path, _MEDIA, FileResponse, PlainTextResponse)

    @app.get("/page")
    def page(path: str) -> Any:
        return _served(roots, path, (".html",), FileResponse, PlainTextResponse)

    blocks, look = _blocks(roots, queue)
    app = mount_gradio_app(
        app, blocks, "/", ssr_mode=False, footer_links=[], run_history=False, max_file_size=MAX_UPLOAD_BYTES,
        allowed_paths=[], show_error=False, pwa=False, enable_monitoring=False, mcp_server=False, **look,
    )  # fmt: skip
    remove_unused(roots.uploads, queue.jobs())
    queue.start()
    name = "localhost" if host in LOOPBACK else socket.gethostname() if host in _EVERYWHERE else host
    shown = f"http://{f'[{name}]' if ':' in name else name}:{place.getsockname()[1]}/"
    say(f"open {shown}{f'?token={quote(token, safe=str())}' if token else ''}")
    config = uvicorn.Config(
        Gate(Uploads(app, roots.uploads, queue.jobs), token, host in LOOPBACK), log_level="warning",
        timeout_graceful_shutdown=1, access_log=False,
    )  # fmt: skip
    try:
        uvicorn.Server(config).run(sockets=[place])
    finally:
        queue.close()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    place = socket.socket(family)
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        place.bind((host, port))
        place.listen()  # whoever opens the address at once waits until it is answered
    except OSError as error:
        place.close()
        raise UserError(f"--port {port}: cannot listen on {host} ({error.strerror}); give another, such as 0") from None
    return place


def _served(roots: Roots, path: str, suffixes: tuple[str, ...], found: Any, refused: Any) -> Any:
    """Return a file inside the roots, of a kind that a browser only shows."""
    try:
        file = roots.path(path, "file")
    except MalformedPath as error:
        return refused(str(error), 400)
    except UserError as error:
        return refused(str(error), 404)
    if file.suffix.lower() not in suffixes or not file.is_file():
        return refused(f"{file.name}: only {', '.join(suffixes)} are shown here", 404)
    return found(file)


def _blocks(roots: Roots, queue: Queue) -> tuple[Any, dict[str, Any]]:
    """Return the page, and how it looks: fonts of the reader's own system, nothing fetched."""
    import gradio as gr

    from longtake.ui import data, generate, lora, runs

    system = ["ui-sans-serif", "system-ui", "sans-serif"]
    mono = ["ui-monospace", "Menlo", "Consolas", "monospace"]
    theme = gr.themes.Default(primary_hue="blue", neutral_hue="slate", font=system, font_mono=mono)
    with gr.Blocks(title="Longtake", analytics_enabled=False) as blocks:
        with gr.Tab("Generate", id="generate"):
            generate.build(roots, queue)
        with gr.Tab("Runs", id="runs"):
            runs.build(roots, queue)
        with gr.Tab("Data", id="data"):
            data.build(roots)
        with gr.Tab("LoRA", id="lora"):
            lora.build(roots, queue)
    return blocks, {"theme": theme, "css": _scoped(pages.STYLE) + _STYLE, "head": '<link rel="icon" href="data:,">'}


def _scoped(style: str) -> str:
    """Return the style of Longtake's own pages, for what stands inside `.lt` alone."""
    frames = re.findall(r"@keyframes \w+\{(?:[^{}]*\{[^{}]*\})*\}", style)
    for one in frames:
        style = style.replace(one, "")
    style = re.sub(r"body\{[^}]*\}", "", style).replace(":root", "&")
    return f".lt{{{style}}}{''.join(frames)}"
