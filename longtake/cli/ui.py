"""`longtake ui ROOT...`: the page in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def ui(
    roots: Annotated[
        list[Path],
        typer.Argument(metavar="ROOT...", help="Folders that the page may see; in the first it keeps what it makes."),
    ],
    host: Annotated[str, typer.Option(help="Address to listen on; any but this machine's own takes a token.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 7860,
    token: Annotated[
        str | None,
        typer.Option(envvar="LONGTAKE_UI_TOKEN", help="What a browser must show first; default: made up if needed."),
    ] = None,
) -> None:
    """Open a page in the browser: make videos, watch and queue runs, look at clips, fix captions, train a LoRA.

    It does nothing that these commands do not, and shows the command of each. Needs `pip install '.[ui]'`.
    """
    from longtake.track.progress import make_console
    from longtake.ui.server import serve

    serve(roots, host, port, token, lambda line: make_console().print(line, soft_wrap=True))
