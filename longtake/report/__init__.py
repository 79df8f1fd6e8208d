"""HTML pages from Jinja2 templates, with one page frame and one stylesheet.

A module that makes a page collects its facts and calls `render`; the layout is in `templates/`. Bars, curves and films
are drawn by `longtake.pages`.
"""

from longtake.report.rendering import render
