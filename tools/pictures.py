"""The pictures of docs/: what a command prints, or an HTML page, as a PNG drawn by headless Chromium.

python tools/pictures.py docs/images/doctor.png longtake doctor outputs/good --quick --objective.predict velocity
python tools/pictures.py docs/images/watch.png outputs/good/watch.html
"""

from __future__ import annotations

import argparse
import io
import shutil
import subprocess
import tempfile
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

WIDTH = 130  # letters of a terminal's line
COLOURS = 64  # of a picture, which keeps it small


def terminal(words: list[str], file: Path) -> None:
    """Writes what a command prints as a page with a picture of a terminal."""
    done = subprocess.run(
        ["env", f"COLUMNS={WIDTH}", *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(Text(f"$ {' '.join(words)}\n", style="bold"), Text.from_ansi(done.stdout), sep="")
    svg = console.export_svg(title=words[0], theme=MONOKAI, font_aspect_ratio=0.61)
    file.write_text(f"<!doctype html><meta charset=utf-8><style>body{{margin:0}}svg{{width:100%}}</style>{svg}")


def draw(page: Path, picture: Path, width: int) -> None:
    """The whole page as a PNG of so many pixels in width."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        shown = browser.new_page(viewport={"width": width, "height": 400})
        shown.goto(page.resolve().as_uri())
        pixels = io.BytesIO(shown.screenshot(full_page=True))
        browser.close()
    Image.open(pixels).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(picture, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--width", type=int, default=1100)
    parser.add_argument("source", nargs=argparse.REMAINDER, help="an HTML file, or a command")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        page = Path(asked.source[0])
        if page.suffix != ".html":
            page = Path(folder) / "terminal.html"
            terminal(asked.source, page)
        draw(page, asked.picture, asked.width)


if __name__ == "__main__":
    main()
