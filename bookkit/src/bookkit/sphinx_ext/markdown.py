"""From Markdown that GitHub and Colab also show to what the site can do better."""

from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

ALERTS = {
    "[!NOTE]": nodes.note,
    "[!TIP]": nodes.tip,
    "[!IMPORTANT]": nodes.important,
    "[!WARNING]": nodes.warning,
    "[!CAUTION]": nodes.caution,
}


class AlertsAndBadges(SphinxTransform):
    """GitHub's alerts become admonitions, and the line with the badge of Colab goes."""

    default_priority = 3  # before messages are collected (10)

    def apply(self, **_: Any) -> None:
        for quotation in list(self.document.findall(nodes.block_quote)):
            mark = next(iter(quotation.findall(nodes.Text)), nodes.Text(""))
            if admonition := ALERTS.get(mark):
                first = mark.parent
                del first[:2]  # the mark and the end of its line
                first.rawsource = first.rawsource.partition("\n")[2]
                quotation.replace_self(admonition("", *quotation.children))
        for image in list(self.document.findall(nodes.image)):
            if image["uri"].endswith("/colab-badge.svg"):
                link = image.parent
                link.parent.parent.remove(link.parent)


def setup(app: Sphinx) -> None:
    app.add_transform(AlertsAndBadges)
