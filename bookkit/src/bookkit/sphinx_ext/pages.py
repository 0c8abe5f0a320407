"""What the templates are told, what pages offer for download, and what no page needs."""

import shutil
import zipfile
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

from bookkit.model.book import Book
from bookkit.model.chapter import load_chapter
from bookkit.run.execute import stack
from bookkit.sphinx_ext.frame import edition

logger = logging.getLogger(__name__)

# The theme's files and Sphinx's that site/templates/layout.html does not load.
UNUSED = """
    scripts styles vendor webpack-macros.html sbt-webpack-macros.html images/logo_*
    basic.css pygments.css mystnb*.css locales plus.png minus.png file.png
    searchtools.js language_data.js doctools.js sphinx_highlight.js documentation_options.js
    translations.js **/*.map
""".split()


def context_of(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any
) -> None:
    book = Book(app.srcdir)
    here = book.language(app.config.language)
    up = "../" * pagename.count("/")  # to this language's root
    root = up + "../" * here.path.count("/")  # to the site's root
    first = book.chapters[0] if book.chapters else None
    context["book_langs"] = [
        {
            "code": language.web,
            "name": language.name,
            "current": language == here,
            "rel": f"{root}{language.path}{pagename}.html",
            "abs": book.page_url(pagename, language),
        }
        for language in book.languages
    ]
    if pagename in app.env.found_docs:
        context["metatags"] = context.get("metatags", "") + alternates(context["book_langs"])
    context["book_base_url"] = book.site
    context["book_repo_url"] = book.repo
    context["book_zip_url"] = f"{up}notebooks.zip"
    context["book_stack"] = executed_with()
    if first:
        context["book_first_url"] = f"{up}{first}.html"
        context["book_first_colab"] = book.colab_url(first, here)
    if pagename in app.env.found_docs:
        path = book.source(pagename).relative_to(book.root).as_posix()
        if book.kind(pagename) != "reference":
            context["book_minutes"] = load_chapter(book.source(pagename)).minutes
        context["book_source_url"] = f"{book.repo}/blob/{book.ref}/{path}"
    if pagename in book.chapters:
        context["book_colab_url"] = book.colab_url(pagename, here)
        context["book_kaggle_url"] = book.kaggle_url(pagename, here)
        context["book_ipynb_url"] = f"{up}notebooks/{book.notebook(pagename).name}"


def alternates(languages: list[dict[str, Any]]) -> str:
    """What tells search engines that pages are translations of each other."""
    default = {"code": "x-default", "abs": languages[0]["abs"]}
    return "".join(
        f'\n    <link rel="alternate" hreflang="{page["code"]}" href="{page["abs"]}">'
        for page in [*languages, default]
    )


def executed_with() -> str:
    versions = stack()
    names = {"jax": "JAX", "flax": "Flax", "python": "Python"}
    return ", ".join(f"{names[key]} {versions[key]}" for key in names if key in versions)


def check_notebooks(app: Sphinx, env: BuildEnvironment) -> None:
    if app.builder.format != "html":
        return
    book = Book(app.srcdir)
    for page in book.chapters:
        path = book.notebook(page, book.language(app.config.language))
        if not path.exists():
            where = path.relative_to(book.root)
            logger.warning("%s is missing: run `make sync` and commit it", where, location=page)


def rewrite_all_if_navigation_changed(app: Sphinx, env: BuildEnvironment) -> list[str]:
    """Every page shows the contents and the edition: when either changes, write every page."""
    book = Book(app.srcdir)
    navigation = [(page, env.titles[page].astext()) for page in book.pages if page in env.titles]
    navigation += edition(book, book.language(app.config.language)).items()
    known = getattr(env, "book_navigation", None)
    env.book_navigation = navigation  # type: ignore[attr-defined] # kept with the environment
    return sorted(env.found_docs) if known not in (None, navigation) else []


def forget_removed(
    app: Sphinx, env: BuildEnvironment, added: set[str], changed: set[str], removed: set[str]
) -> list[str]:
    """A page that left the book leaves the output too."""
    for page in removed:
        Path(app.outdir, f"{page}.html").unlink(missing_ok=True)
    return []


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
    """notebooks/*.ipynb beside the pages, and all of them as notebooks.zip, the same bytes each time."""
    language = book.language(code)
    shutil.rmtree(out / "notebooks", ignore_errors=True)
    (out / "notebooks").mkdir(parents=True)
    with zipfile.ZipFile(out / "notebooks.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for page in book.chapters:
            path = book.notebook(page, language)
            if path.exists():
                shutil.copyfile(path, out / "notebooks" / path.name)
                entry = zipfile.ZipInfo(f"notebooks/{path.name}", (2000, 1, 1, 0, 0, 0))
                entry.compress_type = zipfile.ZIP_DEFLATED
                entry.external_attr = 0o644 << 16
                archive.writestr(entry, path.read_bytes())


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


def read_again_after_warnings(app: Sphinx, exception: Exception | None) -> None:
    """Sphinx warns only about the pages that it reads: keep nothing that hides a warning next time."""
    if exception or app._warncount:
        Path(app.doctreedir, "environment.pickle").unlink(missing_ok=True)


def setup(app: Sphinx) -> None:
    app.add_config_value(
        "comments_config", {}, ""
    )  # jupyter-book sets it, sphinx_comments is not used
    app.connect("html-page-context", context_of, priority=400)
    app.connect("env-get-outdated", forget_removed)
    app.connect("env-updated", rewrite_all_if_navigation_changed)
    app.connect("env-check-consistency", check_notebooks)
    app.connect("build-finished", finish, priority=900)
    app.connect("build-finished", read_again_after_warnings, priority=950)
