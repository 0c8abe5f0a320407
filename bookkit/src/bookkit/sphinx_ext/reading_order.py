"""Previous and Next lead through the chapters; deeper pages hang on their chapter.

Sphinx would go through _toc.yml depth first, so that a reader who only turns pages met every deeper
page before the next chapter. Here the top level of the parts is one path, a page of `sections:` leads
back to its chapter and on to the chapter after it, and pages of the reference have neither.
"""

from __future__ import annotations

from typing import Any

from sphinx.application import Sphinx

from bookkit.model.book import Book


def turn(book: Book, page: str) -> tuple[str | None, str | None]:
    """The pages before and after this one, as a reader goes through the book."""
    path, parents = book.path, book.parents
    if page in parents:
        return parents[page], after(path, parents[page])
    if page not in path:
        return None, None
    at = path.index(page)
    return path[at - 1] if at else None, after(path, page)


def after(path: list[str], page: str) -> str | None:
    return dict(zip(path, path[1:])).get(page)


def context_of_order(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any
) -> None:
    if pagename not in app.env.found_docs:
        return
    book, titles = Book(app.srcdir), app.env.titles

    def link(page: str) -> dict[str, str]:
        title = app.builder.render_partial(titles[page])["title"]  # type: ignore[attr-defined]
        return {"link": app.builder.get_relative_uri(pagename, page), "title": title}

    before, next_one = turn(book, pagename)
    context["prev"] = link(before) if before else None
    context["next"] = link(next_one) if next_one else None
    context["book_deeper"] = [link(page) for page in book.sections(pagename)]


def setup(app: Sphinx) -> None:
    app.connect("html-page-context", context_of_order, priority=460)
