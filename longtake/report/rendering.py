"""Fill a template."""

from __future__ import annotations

from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined

from longtake import pages
from longtake.contracts import visible


def render(template: str, **values: object) -> str:
    """Return the text of `templates/TEMPLATE` with `values`.

    What is not `Html` is escaped, and control characters in it are written out. A name that the template needs and
    `values` lacks is an error.
    """
    return _environment().get_template(template).render(**values)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("longtake.report"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {"style": pages.Html(pages.STYLE), "table": pages.table, "tiles": pages.tiles}
    environment.globals |= {"pairs": pages.pairs, "grid": pages.grid, "keys": pages.keys}
    return environment


def _shown(value: object) -> object:
    return value if hasattr(value, "__html__") else visible(str(value))
