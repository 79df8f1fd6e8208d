"""Reading a report the way a browser does, to see what it holds and what it asks for."""

from __future__ import annotations

import base64
import io
from html.parser import HTMLParser
from pathlib import Path

from PIL import Image

_OUTSIDE = ("src", "href", "action", "data", "poster", "srcset")


class Page(HTMLParser):
    """The pictures, texts and tables of an HTML file; fails on tags that are not closed in order."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.pictures: list[tuple[str, Image.Image]] = []  # (alt, picture)
        self.links: list[str] = []  # everything that is fetched or leads out
        self.texts: list[str] = []
        self.tags: list[str] = []
        self.lines: list[int] = []  # points of each drawn line
        self._open: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self._open == [], "tags were left open"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append(tag)
        if tag == "img":
            head, _, data = (found["src"] or "").partition(",")
            assert head == "data:image/png;base64"
            self.pictures.append((found["alt"] or "", Image.open(io.BytesIO(base64.b64decode(data, validate=True)))))
        else:
            self.links += [found[name] or "" for name in _OUTSIDE if name in found]
        if tag == "polyline":
            self.lines.append(len((found["points"] or "").split()))
        if tag not in ("img", "meta", "polyline", "line"):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip() and self._open[-1:] != ["style"]:
            self.texts.append(data.strip())

    def section(self, title: str) -> list[str]:
        """The texts from a heading on."""
        return self.texts[self.texts.index(title) + 1 :]
