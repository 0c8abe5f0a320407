"""Each rule with a page that passes and one that fails."""

import dataclasses

import nbformat
import pytest

from bookkit.lint import command
from bookkit.lint.names import GONE, imports
from bookkit.lint.repository import static_file
from bookkit.lint.rules import CHAPTER, RULES, WHOLE, Page, of_book, of_page, of_text
from bookkit.model.book import Book, Problem
from bookkit.model.chapter import parse
from bookkit.words import sync
from toy import CHECK, FRONT, ROOT, SOLVED, STUB, code

BOOK = Book()
NAME = "99-toy"
COLAB, SITE = BOOK.colab_url(f"book/{NAME}"), BOOK.page_url(f"book/{NAME}")
BADGE = f"[![Open in Colab]({BOOK.site}_static/colab-badge.svg)]({COLAB}) [Read]({SITE})"
TITLE = f"# A title\n\n{BADGE}\n\nText."
SVG = "<svg aria-label=\"P('a') puts rows on devices\">"


def printed(text, name="stdout"):
    return nbformat.v4.new_output("stream", name=name, text=text)


def shown(kind, data):
    return nbformat.v4.new_output("display_data", data={kind: data})


def page_of(*parts, kind=CHAPTER, outputs=(), name=NAME):
    """A page of these pieces of Markdown; what its first code cell showed."""
    chapter = parse(f"book/{name}", FRONT + "\n" + "\n\n".join(parts) + "\n")
    page = Page(chapter, kind, BOOK)
    new = {"code": nbformat.v4.new_code_cell, "markdown": nbformat.v4.new_markdown_cell}
    cells = [new[cell.kind](cell.source) for cell in chapter.cells]
    if chapter.code:
        cells[chapter.code[0].index - 1].outputs = list(outputs)
    page.__dict__["executed"] = nbformat.v4.new_notebook(cells=cells)
    return page


def ran(*outputs, tags=()):
    return page_of("# A", code("show()", *tags), outputs=outputs)


def folded(source, tag="hide-cell"):
    return code(source, tag, cellView="form")


ASIDE = '<details class="aside">\n<summary>More</summary>\n\nTwo.\n\n</details>'
EXERCISE = [STUB, CHECK, SOLVED]
LINKS = f"[chapter 1]({BOOK.page_url('book/01-mesh')}) · [a](https://github.com/o/r/issues/1)"


def entry(heading="## `SumError … 8 times, but 10`", tags=("id-a",), more="Text.", links=LINKS):
    """A page of one entry, whose cell printed a message, broken into lines."""
    raised = printed("SumError: cut\n8 times, but\n10")
    parts = heading, code("show()", *tags), more, links
    return page_of(*parts, kind="reference", outputs=[raised], name="messages-toy")


# rule, a page that it passes, a page that it must see, what the message says
PAGES = [
    ("narrow-lines", code("x = 1"), code("x = 1  # " + "long " * 20), "columns; break it"),
    ("known-tags", code("x", "hide-cell", "id-a-2"), code("x", "hide-cel"), "hide-cel"),
    ("known-tags", code("x", "from-quickstart"), code("x", "id-A"), "id-A"),
    ("folded-cells", folded("# @title Helper\nx"), code("x", "hide-cell"), "cellView: form"),
    ("folded-cells", folded("# @title A\nx", "hide-input"), folded("x"), "without a title"),
    ("folded-cells", "# A", code("# @title A\nx", cellView="form"), "the tag hide-cell"),
    ("names-of-cells", code("x", "id-a"), [code("x", "id-a")] * 2, "id-a names the cell"),
    ("names-of-cells", "# A", code("x", "id-a", "id-b"), "two names"),
    ("exercise-cells", EXERCISE, [STUB, CHECK], "solution-a"),
    ("exercise-cells", EXERCISE, [CHECK, STUB, SOLVED], "order"),
    ("exercise-cells", EXERCISE, [code("pass", "exercise-a"), CHECK, SOLVED], "the stub does not"),
    ("exercise-cells", EXERCISE, [STUB, code("pass", "check-a"), SOLVED], "define check_a"),
    ("exercise-cells", EXERCISE, [STUB, CHECK, code("answer_a = 1", "solution-a")], "is folded"),
    ("exercise-cells", code("x"), page_of(STUB, kind="reference"), "solution-a"),
    ("badge", TITLE, code("x"), "begins with"),
    ("badge", TITLE, TITLE.replace("99-toy.ipynb", "98.ipynb"), "Colab badge"),
    ("badge", page_of("# A", kind="page"), page_of("# A", code("x"), kind="page"), "Colab badge"),
    ("folded-text", ASIDE, ASIDE.replace("</summary>\n\n", "</summary>\n"), "Colab misreads"),
    ("folded-text", "`<details>` is a tag", "A\n\n</details>", "without its other half"),
    ("plain-words", "This is true: `just`.", "This is simply true.", "simply"),
    ("plain-words", 'It says "simply initialized".', "Initialized.", "American"),
    ("plain-words", "Initialise, materialize.", "We initialize it.", "American"),
    (
        "alt-text",
        "![Eight devices in rows](https://a.b/c.svg)",
        "![](https://a.b/c)",
        "no alt text",
    ),
    ("alt-text", "# A", "![mesh.svg](https://a.b/c.svg)", "file name"),
    ("alt-text", "# A", '<img src="c.svg">', "no alt text"),
    ("alt-text", "# A", "![A mesh](https://a.b/c.svg)", "conclusion"),
    ("portable", "`x`, $a_{b} < c$ and ## no heading.", "(label)=\n## A", "MyST target"),
    ("portable", "A {ref} and `label`.", "See {ref}`label`.", "MyST role"),
    ("portable", "```text\nA\n```", "```{note}\nA\n```", "MyST directive"),
    ("portable", "> [!NOTE]\n> A", "> [!HINT]\n> A", "an alert that GitHub lacks"),
    ("portable", "> A [!quotation].", "> [!NOTE] Title\n> A", "an alert that GitHub lacks"),
    ("portable", "[a](https://a.b/c_(d))", "[a](02-variables.md)", "Colab cannot follow"),
    ("portable", "[a](https://a.b#c)", "[a](#section)", "Colab cannot follow"),
    ("portable", "# A", "[a][b]\n\n[b]: https://a.b", "reference link"),
    ("portable", "# A", "[](https://a.b)", "without text"),
    ("portable", "# A", "A[^1].\n\n[^1]: B", "footnote"),
    ("portable", "`<sub>`", "A<sub>1</sub>", "raw HTML"),
    ("portable", ASIDE, '<details open class="aside">', "raw HTML"),
    ("portable", page_of("{ref}`a`", kind="page"), "{ref}`a`", "MyST role"),
    ("portable", "`{{ x }}`", "A {{ version }}", "substitution"),
    ("portable", "$x$", "A \\(x\\)", "dollar signs"),
    ("portable", "90% of it", "A\n\n% hidden", "comment"),
    ("one-title", ["# A", "## B", code("# x"), "### C"], ["# A", "# B"], "second title"),
    ("one-title", "# A\n\n```\n# B\n```", "# A\n\n### B", "skips a level"),
    ("quiet", ran(printed("fine, at 2×4")), ran(printed("noise", "stderr")), "stderr"),
    ("quiet", ran(), ran(printed("a.py:3: UserWarning: old")), "warning"),
    (
        "quiet",
        ran(printed("older: UserWarning: old")),
        ran(nbformat.v4.new_output("error", ename="E", evalue="v", traceback=[])),
        "fails",
    ),
    ("same-next-time", ran(printed("0x7f")), ran(printed("<f at 0x7f12345678>")), "in memory"),
    ("same-next-time", ran(printed("12:34:56"), tags=["timing"]), ran(printed("12:34:56")), "time"),
    ("same-next-time", ran(), ran(printed("/tmp/ipykernel_12/3.py")), "temporary path"),
    ("same-next-time", ran(printed("2026")), ran(printed("on 2026-11-20")), "date"),
    *(
        ("described-pictures", ran(shown("text/html", SVG)), ran(shown(kind, data)), "a picture of")
        for kind, data in (
            ("text/html", '<svg aria-label="x.svg">'),
            ("text/html", '<img src="x">'),
            ("image/png", "AAAA"),
        )
    ),
    ("message-entries", entry(), entry("## SumError"), "quote it in code form"),
    ("message-entries", entry(more=""), entry(tags=()), "tag it id-SLUG"),
    (
        "message-entries",
        entry(),
        entry(links="[a](https://github.com/o/r/issues/1)"),
        "no link to what teaches it",
    ),
    (
        "message-entries",
        entry(),
        entry(links=f"[a]({BOOK.page_url('book/01-mesh')}) https://github.com/o/r"),
        "no link to a public thread",
    ),
    ("message-entries", entry(), entry("## `SumError … 9`"), "'9' is in no output and no test"),
    ("real-names", "`jax.jit`, `x.sharding`", "`jax.sharding.used_mesh`", "used_mesh"),
    ("real-names", "`nnx.Param`, `make_messh`", "`nnx.Parm`", "nnx.Parm"),
    ("real-names", "`jax.make_mesh(…)`", "`@jax.jit_all(f)`", "jax.jit_all"),
    ("real-names", "`jax.sharding.use_mesh`", "`jax.none.at_all`", "jax.none.at_all"),
]


def as_page(given):
    if isinstance(given, Page):
        return given
    return page_of(*([given] if isinstance(given, str) else given))


@pytest.mark.parametrize(
    "rule, good, bad, piece", PAGES, ids=[f"{rule}-{piece}" for rule, *_, piece in PAGES]
)
def test_rule(rule, good, bad, piece):
    assert not (said := [str(one) for one in of_page(as_page(good), [RULES[rule]])]), said
    page = as_page(bad)
    found = list(of_page(page, [RULES[rule]]))
    last = page.chapter.cells[-1].line + len(page.chapter.cells[-1].lines)
    assert any(piece in str(one) for one in found), f"{rule} does not see it: {found}"
    assert all(one.path == f"{page.chapter.page}.md" and 1 <= one.line <= last for one in found)


def test_a_finding_names_the_line():
    long = code("x = 1\ny = 2  # " + "long " * 20)
    page = page_of("# A", long, "Fine.\n\nThis is simply true.")
    start = FRONT.count("\n") + len(["", "# A", "", "```{code-cell} ipython3", "x = 1"])
    found = {one.rule: one.line for one in of_page(page, RULES.values())}
    assert found["narrow-lines"] == start + 1 and found["plain-words"] == start + 6


def test_a_message_is_also_quoted_by_a_test_of_its_page(tmp_path):
    page = dataclasses.replace(entry("## `SumError … 9`"), book=Book(tmp_path))
    page.__dict__["executed"] = entry().executed
    for name in ("_config.yml", "_toc.yml"):
        (tmp_path / name).write_text((ROOT / name).read_text("utf-8"), "utf-8")
    assert list(of_page(page, [RULES["message-entries"]]))
    (tmp_path / "tests" / "book").mkdir(parents=True)
    tests = tmp_path / "tests" / "book" / "test_messages_toy.py"
    tests.write_text("def test_sum():\n    assert 'cut 9' in raised\n")
    assert not list(of_page(page, [RULES["message-entries"]]))


def test_without_an_execution_of_this_code_one_rule_says_so():
    page = page_of("# A", code("x"))
    page.__dict__["executed"] = None
    rules = [RULES[name] for name in ("executed", "quiet", "same-next-time", "described-pictures")]
    assert [one.rule for one in of_page(page, rules)] == ["executed"]


def test_names_that_are_gone_do_not_import():
    assert not [name for name in GONE if imports(name)]


@pytest.mark.parametrize(
    "url, piece",
    [
        (BOOK.page_url("book/77-none"), "no such page"),
        (f"{BOOK.site}wheels/other.whl", "no such page or file"),
        (BOOK.colab_url("book/77-none"), "not in the repository"),
        (f"{BOOK.site}_static/none.svg", "site/static"),
        (f"{BOOK.repo}/blob/{BOOK.ref}/none.py", "not in the repository"),
    ],
)
def test_own_addresses(url, piece):
    rule = [RULES["own-addresses"]]
    good = f"a\n[a]({BOOK.page_url(BOOK.pages[0])}) [b]({BOOK.site}_static/figures/drawing_explained.svg)"
    assert not list(of_text("a.md", good, BOOK, rule))
    [found] = of_text("a.md", f"a\n[a]({url}).", BOOK, rule)
    assert piece in found.what and found.line == 2
    drawing = ROOT / "book" / "figures" / "drawing_explained.svg"
    assert static_file(BOOK, "figures/drawing_explained.svg") == drawing


# The book as a whole: three pages, then with one thing wrong.

TOY = FRONT + "\n# A\n\n" + "\n\n".join(EXERCISE) + "\n"
FILES = {
    "_toc.yml": "format: jb-book\nroot: book/00-intro\n"
    "chapters: [file: book/01-a, file: book/02-b]\n",
    "book/00-intro.md": "# Intro\n\nWe choose Auto, see [a](https://a.b).\n",
    "book/01-a.md": TOY,
    "book/02-b.md": TOY,
}


@pytest.fixture
def small(tmp_path):
    settings = (ROOT / "_config.yml").read_text("utf-8")
    settings = settings.replace("zh_TW: {name", "ja: {name").replace("zh-TW/", "ja/")
    (tmp_path / "_config.yml").write_text(settings, "utf-8")
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text, "utf-8")
    sync.main([], tmp_path)
    return Book(tmp_path)


PAIR = "notebooks/01-a.ipynb"
# rule, file, what stands there, what stands there instead, what the message says
BOOKS = [
    ("contents", "_toc.yml", "file: book/02-b", "file: book/03-c", "there is no book/03-c.md"),
    ("contents", "_toc.yml", ", file: book/02-b", "", "not in _toc.yml"),
    ("pairs", PAIR, "answer_a = None", "answer_a = 0", "cell 2 is not that"),
    ("pairs", PAIR, '"exercise-a"', '"setup"', "cell 2 is not that"),
    ("pairs", PAIR, '"execution_count": null', '"execution_count": 3', "an execution left"),
    ("pairs", "notebooks/ja/01-a.ipynb", "answer_a = None", "answer_a = 0", "cell 2 is not that"),
    ("pairs", "book/02-b.md", "\n# A", f"\n{code('1')}\n\n# A", "is not that"),
]


def test_a_small_book_passes(small):
    of_whole = [one for one in RULES.values() if WHOLE in one.kinds]
    assert not [str(one) for one in of_book(small, of_whole)]


@pytest.mark.parametrize(
    "rule, name, old, new, piece",
    BOOKS,
    ids=[f"{rule}-{piece}-{old}" for rule, _, old, _, piece in BOOKS],
)
def test_rule_of_the_book(small, rule, name, old, new, piece):
    path = small.root / name
    text = path.read_text("utf-8")
    assert old in text
    path.write_text(text.replace(old, new), "utf-8")
    found = [str(one) for one in of_book(Book(small.root), [RULES[rule]])]
    assert any(piece in one for one in found) if piece else not found, found


def test_notebooks_that_are_gone_or_belong_to_nobody_are_named(small):
    notebooks = small.root / "notebooks"
    (notebooks / "01-a.ipynb").rename(notebooks / "07-none.ipynb")
    said = "\n".join(map(str, of_book(small, [RULES["pairs"]])))
    assert "01-a.ipynb:1: it is missing" in said
    assert "07-none.ipynb:1: it belongs to no chapter" in said


def test_the_command_names_files_and_ends_with_one(tmp_path, capsys, monkeypatch):
    bad = ROOT / "book" / "00-intro.md"
    monkeypatch.setattr(command, "committed", lambda book: [bad])
    check = dataclasses.replace(
        RULES["one-title"], id="never", check=lambda page: iter([(3, "no: do it")])
    )
    monkeypatch.setitem(RULES, "never", check)
    assert command.main(["--rule", "never"]) == 1
    assert "book/00-intro.md:3: no: do it [never]\n1 to mend" in capsys.readouterr().out
    with pytest.raises(Problem, match="no file of the book"):
        command.main([str(tmp_path / "x.md")])
    with pytest.raises(Problem, match="No rule nevr"):
        command.main(["--rule", "nevr"])


def test_cells_and_their_lines_are_read():
    text = f"{FRONT}\n# A\n\n{code('x = 1', 'mesh', 'hide-cell', cellView='form')}\n"
    markdown, cell = parse("book/01-a", text).cells
    assert (markdown.kind, markdown.source, markdown.line) == ("markdown", "# A", 12)
    assert (cell.kind, cell.source, cell.tags) == ("code", "x = 1", ("mesh", "hide-cell"))
    assert cell.metadata["cellView"] == "form" and cell.lines == ["x = 1"]
