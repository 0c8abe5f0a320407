"""Each rule with a page that passes and one that fails, and the addresses of the repository's Markdown."""

import dataclasses
import re
import subprocess

import nbformat
import pytest

from bookkit.lint import command
from bookkit.lint.names import GONE, imports
from bookkit.lint.rules import Page, findings
from bookkit.model.addresses import meaning_of_url
from bookkit.model.book import Book, Problem
from bookkit.model.chapter import parse
from toy import FRONT, ROOT, code

BOOK = Book()
NAME = "99-toy"
COLAB, SITE = BOOK.colab_url(f"book/{NAME}"), BOOK.page_url(f"book/{NAME}")
BADGE = f"[![Open in Colab]({BOOK.site}_static/colab-badge.svg)]({COLAB}) [Read]({SITE})"
TITLE = f"# A title\n\n{BADGE}\n\nText."
SVG = "<svg aria-label=\"P('a') puts rows on devices\">"


def printed(text):
    return nbformat.v4.new_output("stream", text=text)


def shown(kind, data):
    return nbformat.v4.new_output("display_data", data={kind: data})


def page_of(*parts, outputs=(), name=NAME):
    """A page of these pieces of Markdown; what its first code cell showed."""
    page = Page(parse(f"book/{name}", FRONT + "\n" + "\n\n".join(parts) + "\n"), BOOK)
    new = {"code": nbformat.v4.new_code_cell, "markdown": nbformat.v4.new_markdown_cell}
    cells = [new[cell.kind](cell.source) for cell in page.chapter.cells]
    if page.chapter.code:
        cells[page.chapter.code[0].index - 1].outputs = list(outputs)
    page.__dict__["executed"] = nbformat.v4.new_notebook(cells=cells)
    return page


def ran(*outputs, tags=()):
    return page_of("# A", code("show()", *tags), outputs=outputs)


def folded(source):
    return code(source, "hide-cell", cellView="form")


def entry(heading="## `SumError … 8 times, but 10`"):
    """A page of one entry, whose cell printed a message, broken into lines."""
    raised = printed("SumError: cut\n8 times, but\n10")
    return page_of(heading, code("show()", "id-a"), outputs=[raised], name="messages-toy")


CODE = code("x")  # without any, a page is not a notebook
ASIDE = '<details class="aside">\n<summary>More</summary>\n\nTwo.\n\n</details>'
# rule, a page that it passes, a page that it must see, what the message says
PAGES = [
    ("badge", [TITLE, CODE], CODE, "Colab badge"),
    ("badge", "# A", [TITLE.replace("99-toy.ipynb", "98.ipynb"), CODE], "Colab badge"),
    ("narrow-lines", code("x = 1"), code("x = 1  # " + "long " * 20), "columns; break it"),
    ("known-tags", code("x", "hide-cell", "id-a-2"), code("x", "hide-cel"), "hide-cel"),
    ("known-tags", code("x", "from-quickstart"), code("x", "id-A"), "id-A"),
    ("folded-cells", folded("# @title Helper\nx"), code("x", "hide-cell"), "cellView: form"),
    ("folded-cells", folded("# @title A\nx"), folded("x"), "begins with its title"),
    ("folded-cells", CODE, code("# @title A\nx", cellView="form"), "the tag hide-cell"),
    ("folded-cells", CODE, code("answer_a = 1", "solution-a"), "the tag hide-cell"),
    ("alt-text", "![Eight devices in rows](https://a.b/c.svg)", "![](https://a.b/c)", "alt text"),
    ("alt-text", TITLE, "![mesh.svg](https://a.b/c.svg)", "mesh.svg"),
    ("portable", ["`x`, $a_{b} < c$ and ## no.", CODE], ["(label)=\n## A", CODE], "full address"),
    ("portable", ["A {ref} and `a`.", CODE], ["See {ref}`label`.", CODE], "only MyST"),
    ("portable", ["```text\nA\n```", CODE], ["```{note}\nA\n```", CODE], "{note}"),
    ("portable", ["Text.", CODE], [":::{note}\nA\n:::", CODE], "alert"),
    ("portable", ["> [!NOTE]\n> A", CODE], ["> [!HINT]\n> A", CODE], "no such alert"),
    ("portable", ["> A [!quotation].", CODE], ["> [!NOTE] Title\n> A", CODE], "no such alert"),
    ("portable", ["[a](https://a.b/c_(d))", CODE], ["[a](02-variables.md)", CODE], "cannot follow"),
    ("portable", "[a](#section)", ["[a](#section)", CODE], "cannot follow"),
    ("portable", [TITLE, CODE], ["A[^1].\n\n[^1]: B", CODE], "a sentence, or a link"),
    ("portable", ["`<sub>`", CODE], ["A<sub>1</sub>", CODE], "raw HTML"),
    ("portable", ["`{{ x }}`", CODE], ["A {{ version }}", CODE], "write it out"),
    ("portable", ["90% of it", CODE], ["A\n\n% hidden", CODE], "delete it"),
    ("portable", [ASIDE, CODE], [ASIDE.replace("y>\n\n", "y>\n"), CODE], "a blank line"),
    ("portable", [ASIDE, CODE], [ASIDE.removesuffix("</details>"), CODE], "write both"),
    ("same-next-time", ran(printed("0x7f")), ran(printed("<f at 0x7f12345678>")), "in memory"),
    ("same-next-time", ran(printed("12:34:56"), tags=["timing"]), ran(printed("12:34:56")), "time"),
    ("same-next-time", ran(), ran(printed("/tmp/ipykernel_12/3.py")), "temporary path"),
    ("same-next-time", ran(printed("2026")), ran(printed("on 2026-11-20")), "date"),
    ("described-pictures", ran(shown("text/html", SVG)), ran(shown("image/png", "A")), "alt text"),
    ("described-pictures", ran(), ran(shown("text/html", '<svg aria-label="x.svg">')), "x.svg"),
    ("described-pictures", ran(), ran(shown("text/html", '<img src="x">')), "alt text"),
    ("quoted-messages", entry(), entry("## `SumError … 9`"), "'9' is in no output and no test"),
    ("real-names", "`jax.jit`, `x.sharding`", "`jax.sharding.used_mesh`", "used_mesh"),
    ("real-names", "`nnx.Param`, `make_messh`", "`nnx.Parm`", "nnx.Parm"),
    ("real-names", "`jax.make_mesh(…)`", "`@jax.jit_all(f)`", "jax.jit_all"),
    ("real-names", "`jax.sharding.use_mesh`", "`jax.none.at_all`", "jax.none.at_all"),
]


def said(rule, given):
    """What one rule says of a page."""
    if not isinstance(given, Page):
        given = page_of(*([given] if isinstance(given, str) else given))
    return [one for one in findings(given) if one.endswith(f"[{rule}]")]


@pytest.mark.parametrize(
    "rule, good, bad, piece", PAGES, ids=[f"{rule}-{piece}" for rule, *_, piece in PAGES]
)
def test_rule(rule, good, bad, piece):
    assert not said(rule, good)
    assert any(piece in one for one in said(rule, bad))


def test_a_finding_names_the_line():
    [found] = said("narrow-lines", ["# A", code("x = 1\ny = 2  # " + "long " * 20)])
    line = FRONT.count("\n") + len(["", "# A", "", "```{code-cell} ipython3", "x = 1", "y = 2"])
    assert found.startswith(f"book/{NAME}.md:{line}: 109 columns")


def test_a_message_is_also_quoted_by_a_test_of_its_page(tmp_path):
    page = dataclasses.replace(entry("## `SumError … 9`"), book=Book(tmp_path))
    page.__dict__["executed"] = entry().executed
    for name in ("_config.yml", "_toc.yml"):
        (tmp_path / name).write_text((ROOT / name).read_text("utf-8"), "utf-8")
    (tmp_path / "tests" / "book").mkdir(parents=True)
    tests = tmp_path / "tests" / "book" / "test_messages_toy.py"
    tests.write_text("def test_sum():\n    assert 'cut 9' in raised\n")
    assert not said("quoted-messages", page)


def test_without_an_execution_of_this_code_one_rule_says_so():
    page = page_of(TITLE, CODE)
    page.__dict__["executed"] = None
    [found] = findings(page)
    assert "bookkit execute book/99-toy" in found


def test_names_that_are_gone_do_not_import():
    assert not [name for name in GONE if imports(name)]


def test_the_command_names_lines_and_ends_with_one(monkeypatch, capsys):
    monkeypatch.setitem(command.RULES, "never", lambda page: iter([(3, "no: do it")]))
    assert command.main([str(ROOT / "book" / "00-intro.md")]) == 1
    assert "book/00-intro.md:3: no: do it [never]\n" in capsys.readouterr().out
    with pytest.raises(Problem, match="is not a page"):
        command.main(["README.md"])


def test_addresses_of_the_book_lead_to_pages_and_files():
    """Sphinx sees to those of pages and headings on pages; here also READMEs, and files."""
    names = subprocess.check_output(["git", "ls-files", "*.md"], cwd=ROOT, text=True).split()
    for name in names:
        for url in re.findall(r"https://[^\s<>\"'`)\]}]+", (ROOT / name).read_text("utf-8")):
            if target := meaning_of_url(url.rstrip(".,;:*|"), BOOK):
                folder = {"repository": ROOT, "static": ROOT / "site" / "static"}.get(target.kind)
                if target.name.startswith("figures/"):
                    folder = ROOT / "book"
                assert target.kind != "unknown", f"{name}: {url}"
                assert folder is None or (folder / target.name).exists(), f"{name}: {url}"
