"""The picture shown where a link to a page is shared: its title beside the drawing of social.png.

Only in English: Chinese uses the reader's fonts, which the machine that builds need not have.
"""

import textwrap
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont
from sphinx.application import Sphinx

INK, QUIET, LEFT, DRAWING = "#e6e8ec", "#b9bec8", 64, 664  # pixels from the left


def card(static: Path, book: str, title: str) -> Image.Image:
    picture = Image.open(static / "social.png").convert("RGB")
    draw = ImageDraw.Draw(picture)
    draw.rectangle((0, 0, DRAWING, picture.height), fill=picture.getpixel((0, 0)))
    font = ImageFont.truetype(static / "fonts" / "book-sans.woff2", 54)
    font.set_variation_by_axes([700])
    lines = textwrap.wrap(title, 22)
    draw.text((LEFT, 315), "\n".join(lines), INK, font, anchor="lm", spacing=14)
    small = ImageFont.truetype(static / "fonts" / "book-serif.woff2", 30)
    draw.text((LEFT, 566), book, QUIET, small, anchor="ls")
    return picture.quantize(256)


def with_card(app: Sphinx) -> set[str]:
    """The pages that have one; the others show social.png itself."""
    return app.env.found_docs - {app.config.root_doc} if app.config.language == "en" else set()


def draw_cards(app: Sphinx, exception: Exception | None) -> None:
    if exception or app.builder.format != "html":
        return
    static = Path(app.outdir, "_static")
    for page in with_card(app):
        path = static / "cards" / f"{page}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        title = app.env.titles[page].astext()
        card(static, app.config.project, title).save(path, optimize=True)


def named(app: Sphinx, pagename: str, template: str, context: dict[str, Any], tree: Any) -> None:
    if pagename in with_card(app):
        context["book_card"] = f"cards/{pagename}.png"


def setup(app: Sphinx) -> None:
    app.connect("html-page-context", named)
    app.connect("build-finished", draw_cards)
