"""Printed lines `predicted X · measured Y` are marked: a tick if the two are equal, else a cross."""

from __future__ import annotations

import html
import re

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.locale import _

LINE = re.compile(r"(.*?)predicted (.+?) ·( +)measured (.+?)(\s*)")


def equal(predicted: str, measured: str) -> bool:
    """Are the two texts the same? After a number and its unit, more words may stand on the right.

    What was predicted to be refused is met by the name of an error, too.
    """
    predicted, measured = predicted.strip(), measured.strip()
    if predicted == measured:
        return True
    if predicted == "refused":
        return re.fullmatch(r"\w*Error", measured) is not None
    words = measured.removeprefix(predicted)
    ends_whole = re.search(r"\d( \D+)?$", predicted) is not None
    return ends_whole and re.fullmatch(r" [^\W\d][^\d]*", words) is not None


def marked(line: str) -> str:
    """A line of output as HTML."""
    found = LINE.fullmatch(line)
    if not found:
        return html.escape(line)
    same = equal(found[2], found[4])
    before, predicted, space, measured, after = map(html.escape, found.groups())
    kind, word = ("agree", _("equal")) if same else ("differ", _("differs"))
    return (
        f'<span class="verdict {kind}">{before}<i>predicted</i> {predicted} <i>·</i>{space}'
        f'<i>measured</i> <b>{measured}</b><span class="sr-only"> ({html.escape(word)})</span>'
        f"{after}</span>"
    )


def mark_predictions(app: Sphinx, doctree: nodes.document) -> None:
    if app.builder.format != "html":
        return
    for block in list(doctree.findall(nodes.literal_block)):
        lines = block.astext().split("\n")
        if "stream" not in block["classes"] or not any(map(LINE.fullmatch, lines)):
            continue
        code = "\n".join(map(marked, lines)).rstrip("\n")
        made = (
            f'<div class="{" ".join(block["classes"])} highlight-myst-ansi notranslate">'
            f'<div class="highlight"><pre><span></span>{code}\n</pre></div></div>'
        )
        block.parent.replace(block, nodes.raw("", made, format="html"))


def setup(app: Sphinx) -> None:
    app.connect(
        "doctree-read", mark_predictions, priority=870
    )  # after drawings are translated (850)
