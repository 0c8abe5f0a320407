"""What lies beside the pages: notebooks to download."""

import shutil
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

from bookkit.model.book import Book

logger = logging.getLogger(__name__)

# The theme's files and Sphinx's that site/templates/layout.html does not load.
UNUSED = """
    scripts styles vendor webpack-macros.html sbt-webpack-macros.html images/logo_*
    basic.css pygments.css mystnb*.css locales plus.png minus.png file.png
    searchtools.js language_data.js doctools.js sphinx_highlight.js documentation_options.js
    translations.js **/*.map
""".split()


def check_notebooks(app: Sphinx, env: BuildEnvironment) -> None:
    if app.builder.format != "html":
        return
    book = Book(app.srcdir)
    for page in book.chapters:
        path = book.notebook(page, book.language(app.config.language))
        if not path.exists():
            where = path.relative_to(book.root)
            logger.warning("%s is missing: run `make sync` and commit it", where, location=page)


def finish(app: Sphinx, exception: Exception | None) -> None:
    if exception or app.builder is None or app.builder.format != "html":
        return
    book, out = Book(app.srcdir), Path(app.outdir)
    offer_notebooks(book, app.config.language, out)
    (out / "index.html").write_text(redirect(book, app.config.language), "utf-8")
    for pattern in UNUSED:
        for path in (out / "_static").glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def offer_notebooks(book: Book, code: str, out: Path) -> None:
    """notebooks/*.ipynb beside the pages, and all of them as notebooks.zip."""
    language, folder = book.language(code), out / "notebooks"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for page in book.chapters:
        shutil.copy2(book.notebook(page, language), folder)
    shutil.make_archive(str(folder), "zip", out, "notebooks")


def redirect(book: Book, code: str) -> str:
    language, first = book.language(code), book.pages[0]
    return f"""<!DOCTYPE html>
<html lang="{language.web}">
<meta charset="utf-8">
<title>{book.config["title"]}</title>
<link rel="canonical" href="{book.page_url(first, language)}">
<meta http-equiv="refresh" content="0; url={first}.html">
<a href="{first}.html">{book.config["title"]}</a>
</html>
"""


def setup(app: Sphinx) -> None:
    app.add_config_value(
        "comments_config", {}, ""
    )  # jupyter-book sets it, sphinx_comments is not used
    app.connect("env-check-consistency", check_notebooks)
    app.connect("build-finished", finish, priority=900)
