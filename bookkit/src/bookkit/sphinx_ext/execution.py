"""Execute what is missing before Sphinx reads."""

from typing import Any

import myst_nb.core.render as myst_nb_render
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.errors import SphinxError

from bookkit.model.book import Book, Problem
from bookkit.run.execute import cache_path, execute


class CellFailed(SphinxError):
    category = "A chapter cannot be executed"


def use_the_books_cache(app: Sphinx, config: Config) -> None:
    if config.nb_execution_mode == "cache":
        try:
            config.nb_execution_cache_path = str(cache_path(Book(app.srcdir)))
        except Problem as problem:
            raise CellFailed(str(problem)) from None


def execute_missing(app: Sphinx) -> None:
    """Runs before myst-nb reads its settings."""
    if app.builder.format != "html":  # linkcheck needs no outputs
        app.config.nb_execution_mode = "off"
    if app.config.nb_execution_mode != "cache":
        return
    try:
        execute(Book(app.srcdir))
    except Problem as problem:
        raise CellFailed(f"\n{problem}") from None


class InlineSvg:
    """An SVG output stands in the page, where it sees the theme, and not in an <img>."""

    @staticmethod
    def handle_mime(_: Any, data: Any, inline: bool) -> list[nodes.Element] | None:
        if data.mime_type != "image/svg+xml" or inline:
            return None
        svg = data.string[max(data.string.find("<svg"), 0) :]  # without an XML prologue
        return [nodes.raw(text=svg, format="html", classes=["output", "image_svg"])]


def setup(app: Sphinx) -> None:
    app.connect("config-inited", use_the_books_cache)
    app.connect("builder-inited", execute_missing, priority=400)
    from_packages = myst_nb_render.load_mime_renders()
    myst_nb_render.load_mime_renders = lambda: [InlineSvg, *from_packages]
