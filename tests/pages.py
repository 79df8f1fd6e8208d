"""Reading a page the way a browser does, to see what it holds and what it asks for."""

from __future__ import annotations

import base64
import io
import re
from html.parser import HTMLParser

from PIL import Image

from longtake.pages import STYLE

_OUTSIDE = ("href", "action", "data", "poster", "srcset")
_ALONE = ("img", "meta", "br", "path")


class Page(HTMLParser):
    """The films, texts, bars and tables of a page; fails on tags left open, a second style, and whatever leads out."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.pictures: list[tuple[str, Image.Image]] = []  # (alt, still or strip of frames)
        self.texts: list[str] = []
        self.bars: list[list[tuple[str, float]]] = []  # (title, percent) of each part
        self.marks: list[float] = []  # lines in bars, percent
        self.lines: list[str] = []  # what is drawn
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == [], "tags were left open"
        assert text.count("<style>") == text.count(STYLE) == 1, "one style for all pages"
        assert "http" not in text
        assert not re.search(r"url\(|@import|javascript:|\son\w+=", text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        assert tag not in ("script", "link", "iframe", "object", "embed", "a", "base"), tag
        assert not found.keys() & set(_OUTSIDE), found
        if tag == "img":
            head, _, data = found["src"].partition(",")
            assert head in ("data:image/png;base64", "data:image/jpeg;base64")
            self.pictures.append((found["alt"], Image.open(io.BytesIO(base64.b64decode(data, validate=True)))))
        if found.get("class", "").startswith("bar"):
            self.bars.append([])
        if tag in ("i", "u") and self._open[-1:] == ["div"] and self.bars:
            share = float(re.search(r"(?:width|left):([\d.]+)%", found["style"])[1])
            self.marks.append(share) if tag == "u" else self.bars[-1].append((found.get("title", ""), share))
        if tag == "path":
            self.lines.append(found["d"])
        if tag not in _ALONE:
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
