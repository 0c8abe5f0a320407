"""From Markdown that GitHub and Colab also show to what the site can do better."""

import re

from sphinx.application import Sphinx

ALERT_LINE = re.compile(r"> \[!(NOTE|TIP|IMPORTANT|WARNING|CAUTION)\]\s*$")
FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
BADGE_LINE = re.compile(r"\[!\[[^\]]*\]\(\S*/colab-badge\.svg\)\]\(\S+\)")


def for_the_site(text: str) -> str:
    """Alerts become admonitions and the badge line goes; no line moves unless it must.

    Code is left as it is. The line after an alert is used for the admonition's end when it is
    blank, as it always is between paragraphs, so that warnings keep their line numbers.
    """
    lines, out = text.split("\n"), []
    fence, index = "", 0
    while index < len(lines):
        line = lines[index]
        index += 1
        mark = FENCE.match(line)
        if fence:
            if mark and mark[1].startswith(fence) and not line.strip().strip("`~"):
                fence = ""
        elif mark:
            fence = mark[1]
        elif alert := ALERT_LINE.match(line):
            out.append(f":::{{{alert[1].lower()}}}")
            while index < len(lines) and lines[index].startswith(">"):
                out.append(re.sub(r"^> ?", "", lines[index]))
                index += 1
            out.append(":::")
            if index < len(lines) and not lines[index].strip():
                index += 1
            continue
        elif BADGE_LINE.match(line):
            line = ""
        out.append(line)
    return "\n".join(out)


def prepare_source(app: Sphinx, docname: str, source: list[str]) -> None:
    source[0] = for_the_site(source[0])


def setup(app: Sphinx) -> None:
    app.connect("source-read", prepare_source)
