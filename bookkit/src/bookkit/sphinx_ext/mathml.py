"""Formulas are MathML when the page is built: browsers draw it without a script."""

from __future__ import annotations

import html
import re
from typing import Any

from docutils import nodes
from math_core import LatexError, LatexToMathML
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util import logging
from sphinx.writers.html5 import HTML5Translator

logger = logging.getLogger(__name__)

WORD_AS_INDEX = re.compile(r"_\{([a-z]{2,})\}")  # a word, not a product of variables
CONVERTER = LatexToMathML(fancy_error=False)


class Formulas(SphinxTransform):
    """Keep what displayed formulas say: Sphinx's way to translate them leaves only "::"."""

    default_priority = 19  # before the translation (20)

    def apply(self, **_: Any) -> None:
        for node in self.document.findall(nodes.math_block):
            source = node.rawsource or node.astext()
            node["tex"] = self.app.translator.gettext(source)


def mathml(node: nodes.Element, block: bool) -> str:
    """A formula for the page; what cannot be read is a warning, which fails the build."""
    tex = node.get("tex", node.astext()).strip()
    try:
        return CONVERTER.convert_with_local_state(
            WORD_AS_INDEX.sub(r"_\\text{\1}", tex), displaystyle=block
        )
    except LatexError as error:
        logger.warning("this formula cannot be shown: %s (%s)", tex, error, location=node)
        return f"<code>{html.escape(tex)}</code>"


def visit_inline(self: HTML5Translator, node: nodes.Element) -> None:
    self.body.append(mathml(node, block=False))
    raise nodes.SkipNode


def visit_block(self: HTML5Translator, node: nodes.Element) -> None:
    made = mathml(node, block=True)
    self.body.append(
        f"{self.starttag(node, 'div', CLASS='math notranslate nohighlight')}{made}</div>\n"
    )
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    app.add_transform(Formulas)
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
