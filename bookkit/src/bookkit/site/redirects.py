"""What moved leads on from its old address: site/redirects.toml, honoured in the built pages.

    "book/01-mesh.html#old" = "book/01-mesh.html#new"     a heading got another name
    "book/01-mesh.html#old" = "book/02-variables.html#x"  a passage moved to another page
    "book/old-name.html" = "book/new-name.html"           a page moved, with all its anchors

No server answers with a redirect here, so pages do it. An anchor that moved within its page is an
empty element at the new place. One that moved to another page is a line with a link, which shows
where somebody asks for it; a script, where there is one, follows the link. A page that moved is a
page that leads on at once, without a script too. All languages alike.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from html import escape
from pathlib import Path
from posixpath import relpath

from bookkit.model.book import Book, Language, Problem
from bookkit.words.catalogues import words_of_site

REDIRECTS = "site/redirects.toml"
MOVED = "This passage has moved:"
# Elements that may hold an empty span before all else.
HOLDERS = {
    *"a blockquote caption dd div dt em figcaption figure h1 h2 h3 h4 h5 h6 li p pre span".split(),
    *"strong td th".split(),
}
TAKES_NONE = {
    "details",
    "ol",
    "section",
    "svg",
    "table",
    "ul",
    "img",
    "math",
    "hr",
}  # an anchor goes before


def read_redirects(book: Book) -> dict[str, str]:
    path = book.root / REDIRECTS
    if not path.exists():
        return {}
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise Problem(f"{REDIRECTS} cannot be read: {error}") from None


def wrong_redirects(book: Book, site: Path) -> Iterator[str]:
    """Entries that cannot be honoured: where to they lead, and what is still at the old address."""
    redirects = read_redirects(book)
    for old, new in redirects.items():
        page, _, anchor = new.partition("#")
        there, here = site / page, site / old.partition("#")[0]
        if new in redirects:
            yield f'{REDIRECTS}: "{old}" leads to {new}, which moved too: name "{redirects[new]}"'
        elif not there.is_file():
            yield f'{REDIRECTS}: "{old}" leads to {page}, which is no page of the site: correct it'
        elif anchor and not opening_tag(there.read_text("utf-8"), anchor):
            yield f'{REDIRECTS}: "{old}" leads to #{anchor}, which {page} does not have: correct it'
        elif "#" not in old and here.is_file():
            yield f'{REDIRECTS}: "{old}" is a page of the site: take the line out'
        elif "#" in old and here.is_file():
            if opening_tag(here.read_text("utf-8"), old.partition("#")[2]):
                yield f'{REDIRECTS}: "{old}" is there, it did not move: take the line out'
        elif "#" in old and old.partition("#")[0] not in redirects:
            page = old.partition("#")[0]
            yield f'{REDIRECTS}: "{old}" is on a page that is gone: say where {page} went, too'


def honour(book: Book, site: Path) -> None:
    """Write the redirects into a built site; raises Problem with all that cannot be honoured."""
    redirects = read_redirects(book)
    for language in book.languages:
        folder = site / language.path
        if wrong := list(wrong_redirects(book, folder)):
            raise Problem("\n".join(wrong))
    for language in book.languages:
        folder = site / language.path
        for old, new in redirects.items():
            page, _, anchor = old.partition("#")
            if anchor and page not in redirects:
                mark(book, language, folder, page, anchor, new)
        for old, new in redirects.items():
            if "#" not in old:
                inside = {
                    address.partition("#")[2]: where
                    for address, where in redirects.items()
                    if address.startswith(f"{old}#")
                }
                path = folder / old
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(leading_on(book, language, old, new, inside), "utf-8")


def opening_tag(html: str, anchor: str) -> re.Match[str] | None:
    """The tag that opens the element with this id."""
    name = re.escape(escape(anchor))
    return re.search(rf"<([a-zA-Z][\w-]*)\b[^<>]*?\sid=[\"']{name}[\"'][^<>]*>", html)


def mark(book: Book, language: Language, site: Path, page: str, anchor: str, new: str) -> None:
    """Let page#anchor lead to `new`, on the same page or on another."""
    path, (there, _, place) = site / page, new.partition("#")
    html = path.read_text("utf-8")
    if there == page and (found := opening_tag(html, place)):
        span = f'<span id="{escape(anchor)}"></span>'
        html = put_in(html, found, span, new)
    else:
        words = words_of_site(book, language)(MOVED)
        title = heading_of((site / there).read_text("utf-8"), place)
        link = f'<a href="{relpath(new, Path(page).parent.as_posix())}">{title}</a>'
        note = f'<p class="moved" id="{escape(anchor)}">{escape(words)} {link}</p>\n'
        html = html.replace("</main>", f"{note}</main>", 1)
    path.write_text(html, "utf-8")


def put_in(html: str, found: re.Match[str], span: str, new: str) -> str:
    """An empty element at the start of another; of a section, at the start of its heading."""
    tag, at = found[1], found.end()
    if tag == "section" and (
        heading := re.compile(r"\s*(?:<span[^>]*></span>\s*)*<h\d[^>]*>").match(html, at)
    ):
        at = heading.end()
    elif tag in TAKES_NONE:
        at = found.start()
    elif tag not in HOLDERS:
        raise Problem(f"{REDIRECTS}: {new} is a <{tag}>, which cannot hold an older anchor")
    return html[:at] + span + html[at:]


def heading_of(html: str, anchor: str) -> str:
    """The heading at an anchor, or of the page, as HTML without links."""
    start = found.end() if anchor and (found := opening_tag(html, anchor)) else html.find("<main")
    heading = re.search(r"<h\d[^>]*>(.*?)<a class=\"headerlink\"", html[start:], re.S)
    words = heading[1] if heading else html[html.find("<title>") + 7 : html.find("</title>")]
    return re.sub(r"<(?!/?code\b)[^>]*>", "", words).strip()


def leading_on(book: Book, language: Language, old: str, new: str, inside: dict[str, str]) -> str:
    """A page that leads on: by a script, which keeps the anchor, else by the browser itself."""
    here = Path(old).parent.as_posix()
    target = relpath(new, here)
    anchors = json.dumps({name: relpath(where, here) for name, where in inside.items()})
    script = (
        f"const moved = {anchors}, name = decodeURIComponent(location.hash.slice(1));"
        f"location.replace(moved[name] || {json.dumps(target)} + location.hash);"
    ).replace("</", "<\\/")
    title = escape(book.config["title"])
    canonical = escape(f"{book.site}{language.path}{new.partition('#')[0]}")
    return f"""<!DOCTYPE html>
<html lang="{language.web}">
<meta charset="utf-8">
<title>{title}</title>
<meta name="robots" content="noindex">
<link rel="canonical" href="{canonical}">
<script>{script}</script>
<noscript><meta http-equiv="refresh" content="0; url={escape(target)}"></noscript>
<p><a href="{escape(target)}">{title}</a></p>
</html>
"""
