"""Markdown cells use only what the site, Colab and GitHub all show well."""
import re

from rules import over_chapters, rule

CODE = re.compile(r"(?ms)^(`{3,}|~{3,})(?!\s*\{).*?^\1\s*$|(?!^`{3})(?<!`)(`+)(?!`).+?(?<!`)\2(?!`)")
BAD = {
    "a MyST target": (r"^\([\w-]+\)=\s*$", "write a heading and link to it by its full address"),
    "a MyST role": (r"\{[\w:-]+\}`", "write it out, or link by full address"),
    "a MyST directive": (r"^\s*(?:`{3,}|:{3,})\s*\{", "use a GitHub alert, a table or a list"),
    "a MyST comment or block break": (r"^(?:%(?:\s|$)|\+\+\+)", "delete it"),
    "a substitution": (r"\{\{.*?\}\}", "write it out"),
    "a link that Colab cannot follow": (r"\]\((?!https?://)[^)]*\)?", "write its full address"),
    "a reference link": (r"(?<!\])\[[^\]\n]+\]\[[^\]\n]*\]|^\[[^\]\n]+\]:\s",
                         "write the address beside the text"),
    "a link without text": (r"(?<!!)\[\s*\]\(", "say where it leads"),
    "a footnote": (r"\[\^", "write a sentence, or a link"),
    "raw HTML": (r"<(?!https?://|!--)/?[a-z][^>]*>", "use Markdown"),
    r"\( \) around a formula": (r"\\\(|\\\[", "use dollar signs"),
}
ALERT = re.compile(r"^>\s*\[!(\w+)\]([^\n]*)\n((?:>[^\n]*\n?)*)", re.M)
KINDS = ("NOTE", "TIP", "IMPORTANT", "WARNING", "CAUTION")


@rule
def portable(chapter):
    for cell in chapter.markdown:
        # Code and formulas are left out, but directives look like code and stay.
        text = CODE.sub(lambda found: re.sub(r"[^\n]", "x", found[0]), cell.source)
        text = re.sub(r"\$\$.*?\$\$|\$[^$\n]+\$", lambda found: re.sub(r"[^\n]", "x", found[0]),
                      text, flags=re.S)
        for what, (pattern, remedy) in BAD.items():
            source = cell.source if what in ("a MyST role",) else text
            for found in re.finditer(pattern, source, re.M):
                yield f"{cell.where}: {what}, {found[0][:40].strip()!r}; {remedy}"


@rule
def alerts(chapter):
    for cell in chapter.markdown:
        for kind, rest, body in ALERT.findall(cell.source):
            if kind not in KINDS:
                yield f"{cell.where}: [!{kind}] is no alert of GitHub's; use {', '.join(KINDS)}"
            if rest.strip():
                yield f"{cell.where}: [!{kind}] stands alone on its line; move {rest.strip()!r} down"
            first = body.lstrip("> \n")
            if not first.startswith("**"):
                yield (f"{cell.where}: the text after [!{kind}] begins with a bold word, because "
                       f"Colab shows the mark as text: {first[:40]!r}")


@rule
def one_title(chapter):
    titles = [(cell, line) for cell in chapter.markdown for line in fenceless(cell.source)
              if re.match(r"# \S", line)]
    for cell, line in titles[1:]:
        yield f"{cell.where}: a second title {line!r}; use ## for sections"
    levels = [(cell, len(found[1]), line) for cell in chapter.markdown
              for line in fenceless(cell.source) if (found := re.match(r"(#+) \S", line))]
    for (_, before, _), (cell, level, line) in zip(levels, levels[1:]):
        if level > before + 1:
            yield f"{cell.where}: {line!r} skips a level; use {'#' * (before + 1)}"


def fenceless(source):
    return CODE.sub("", source).split("\n")


test_portable = over_chapters(__name__)
