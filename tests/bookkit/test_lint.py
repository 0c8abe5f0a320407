"""No rule is blind, and none is always offended: beside each stand what it passes and what it must see."""

import dataclasses

import nbformat
import pytest

from bookkit.lint import command, names, rows
from bookkit.lint.prose import sentences, words
from bookkit.lint.repository import anchors, static_file
from bookkit.lint.rules import (
    CHAPTER,
    KINDS,
    RULES,
    TEXT,
    WHOLE,
    Page,
    of_book,
    of_page,
    of_text,
)
from bookkit.model.book import Book, Problem
from bookkit.model.chapter import parse
from bookkit.words import sync
from toy import CHECK, FRONT, ROOT, SETUP, SOLVED, STUB, code

BOOK = Book()
NAME = "99-toy"
PAGE, COLAB = BOOK.page_url(f"book/{NAME}"), BOOK.colab_url(f"book/{NAME}")
TITLE = (
    f"# A title\n\n[![Open in Colab]({BOOK.site}_static/colab-badge.svg)]({COLAB}) [Read]({PAGE})\n\n"
    "**Question? Answer.**\n\n**You will**\n\n- run\n\n**You need** Python."
)
LONG = " ".join(["word"] * 46) + "."
CLOSING = "## Takeaways\n\n- a\n\n## In practice\n\n## Exercises\n\n## Further reading"
MESH = code("mesh = make((2, 4))", "mesh")
SVG = "<svg aria-label=\"P('a') puts rows on devices\">"


def printed(text, name="stdout"):
    return nbformat.v4.new_output("stream", name=name, text=text)


def shown(**data):
    return nbformat.v4.new_output("display_data", data={key.replace("_", "/"): value for key, value in data.items()})


def page_of(*parts, kind=CHAPTER, outputs=(), name=NAME):
    """A page of these pieces of Markdown; what its first code cell showed."""
    chapter = parse(name, FRONT + "\n" + "\n\n".join(parts) + "\n")
    page = Page(chapter, kind, BOOK)
    cells = [nbformat.v4.new_code_cell(cell.source) if cell.kind == "code" else
             nbformat.v4.new_markdown_cell(cell.source) for cell in chapter.cells]
    if chapter.code:
        cells[chapter.code[0].index - 1].outputs = list(outputs)
    page.__dict__["executed"] = nbformat.v4.new_notebook(cells=cells)
    return page


def ran(*outputs, tags=()):
    return page_of("# A", code("show()", *tags), outputs=outputs)


def unseen(*parts, kind=CHAPTER):
    """The same page, not executed."""
    page = page_of(*parts, kind=kind)
    page.__dict__["executed"] = None
    return page


def proof(source="assert True", slug="a", claim="# @title Checked: one is one", tags=("hide-cell",)):
    return code(f"{claim}\n{source}", "proof", *tags, f"id-{slug}", cellView="form")


def folded(source, *tags):
    return code(source, "hide-cell", *tags, cellView="form")


def lines(count, first="x = 1"):
    return first + "\n    y = 1" * (count - 1) if first.startswith("def") else "\n".join([first] * count)


ASKED = '**Predict.** How many?\n\n<details class="predict">\n<summary>Answer</summary>\n\nTwo.\n\n</details>'
SAID = code('print(f"predicted 2 · measured {two}")', "predicted")
COMPUTED = code('print(f"predicted {mesh.size} · measured {two}")', "predicted", "rerun")
BADGE = f"# A title\n\n[![Open in Colab]({BOOK.site}_static/colab-badge.svg)]({COLAB}) [Read]({PAGE})"


LINKS = f"[chapter 1]({BOOK.page_url('book/01-mesh')}#a) · [a](https://github.com/o/r/issues/1)"
RAISED = proof("assert '8 times,' in x")


def entry(heading="## `SumError … 8 times, but 10`", tags=("id-a",), proven=RAISED, links=LINKS, name="messages-toy"):
    """A page of one entry, whose cell printed a message, broken into lines."""
    raised = printed("SumError: cut\n8 times, but\n10")
    return page_of(heading, code("show()", *tags), proven, links, kind="reference", outputs=[raised], name=name)


# rule, a page that it passes, a page that it must see, what the message says
PAGES = [
    ("narrow-lines", code("x = 1"), code("x = 1  # " + "long " * 20), "columns; break it"),
    ("few-timings", [code("x", "timing")] * 2, [code("x", "timing")] * 3, "third cell tagged timing"),
    ("short-show-cells", [code(lines(20, "def f():")), *[code("x")] * 2], code(lines(21, "def f():")), "20 are the limit"),
    ("short-show-cells", [code(lines(12)), code("x")], [code(lines(13)), code("x")], "12 are the limit"),
    ("short-show-cells", [code(lines(12)), code("x"), folded(lines(30)), proof(lines(30)), code(lines(30), "shared-a")],
     [code(lines(11))] * 6 + [code("x")] * 4, "the median show cell has 11 lines"),
    ("visible-lines", [code(lines(10))] * 25 + [folded(lines(50))], [code(lines(10))] * 26, "260 lines of code"),
    ("read-once", "# A", code("def f(x): return x"), "a function on one line"),
    ("read-once", code("sorted(x, key=lambda one: one.name)"), code("f = lambda x: x"), "a lambda with a name"),
    ("read-once", code("if (n := f(1)) > 2:\n    n"), code("f(n := 2)"), "a walrus inside a call"),
    ("read-once", proof("assert f(n := 2) and eval('x')"), code("eval('x')"), "eval of a string"),
    ("read-once", code("[x for x in y for y in z]"), code("[x for y in z for x in y if x]"), "two `for`s"),
    ("read-once", code("print(*(x for x in y))\na, b = pair"), code("a, b = (f(x) for x in y)"), "unpacked into names"),
    ("read-once", "# A", code("a, *b = *(f(x) for x in y),"), "unpacked into names"),
    ("shows-and-does-not-prove", code("assert x, 'the mesh has 4 devices'"), code("assert x"), "in a cell that shows"),
    ("shows-and-does-not-prove", [code("assert x", "lesson"), proof()], code("def f(x):\n    assert x"), "that shows"),
    ("ends-in-something-seen", unseen(code("x = 1"), proof(), code("x")), unseen(code("x = 1"), code("y = 1")), "neither"),
    ("ends-in-something-seen", unseen(code("for x in y:\n    print(x)")), unseen(code("def f(x):\n    x")), "neither"),
    ("ends-in-something-seen", ran(printed("1")), ran(), "neither this cell nor the next"),
    ("ends-in-something-seen", unseen(code("x = 1"), code("# @title X\nx", "hide-input", cellView="form")),
     unseen(code("x = 1"), folded("# @title X\nx")), "neither"),
    ("one-meaning", [code("def f(x):\n    y = 1"), code("x = y = 1"), code("x = 2")],
     [code("def f(x):\n    x"), code("f = 1")], "f is a function since line"),
    ("one-meaning", [code("import a.b"), code("import a.c\nfrom d import e"), code("from d import e")],
     [code("import a as b"), code("import c as b")], "b is the module a since line"),
    ("one-meaning", "# A", [code("with a as f:\n    x"), code("class f:\n    x = 1")], "becomes a class"),
    ("one-meaning", "# A", [code("def f(x):\n    x"), code("def f(y):\n    y")], "becomes another function"),
    ("folded-cells", folded("# @title Helper\nx"), code("x", "hide-cell"), "cellView: form"),
    ("folded-cells", code("# @title A\nx", "hide-input", cellView="form"), code("# @title A\nx", "hide-input"), "cellView: form"),
    ("folded-cells", "# A", code("# @title A\nx", cellView="form"), "the tag hide-cell"),
    ("folded-cells", "# A", folded("x"), "without a title"),
    ("names-of-cells", [code("x", "id-a"), code("x", "id-b")], [code("x", "id-a"), code("x", "id-a")], "id-a names the cell"),
    ("names-of-cells", "# A", code("x", "id-a", "id-b"), "two names"),
    ("proof-cells", proof(), code("x"), "no proof"),
    ("proof-cells", page_of(code("x"), kind="page"), proof(claim="# @title One is one"), "the first line of a proof"),
    ("proof-cells", proof(), code("# @title Checked: a\nassert x", "hide-cell", cellView="form"), "tag it proof"),
    ("proof-cells", proof(tags=("stored", "hide-cell")), [proof(), code("x", "stored")], "tagged stored"),
    ("proof-cells", proof(), code("# @title Checked: a\nassert x", "proof", "hide-cell"), "tag it id-SLUG"),
    ("proof-cells", proof(), proof(tags=()), "a proof is folded"),
    ("proof-cells", [proof(), proof(slug="b", claim="# @title Checked: two")], [proof(), proof(slug="b")], "once more"),
    ("proof-cells", proof("raise RuntimeError('accepted')"), proof("x = 1"), "cannot fail"),
    ("proof-cells", proof("assert x\nf(x)"), proof("assert x\nprint(x)"), "prints nothing"),
    ("proof-cells", "\n\n".join([proof()]), proof("assert x\nx"), "prints nothing"),
    ("proof-cells", proof(), page_of(proof(), outputs=[printed("1")]), "but this one did"),
    ("proofs-apart", [proof("x = 1\nassert x"), code("x = 2\nx"), proof("assert x", "b"), code("[x for x in y]\ndef f(x):\n    x")],
     [code("x = 2"), proof("x = 1\nassert x"), code("x")], "x comes from the proof"),
    ("proofs-apart", proof("for x in y:\n    assert x"), [proof("for x in y:\n    assert x"), code("def f():\n    x")], "x comes"),
    ("predictions", unseen(ASKED, SAID), "# A", "no prediction"),
    ("predictions", page_of("# A", kind="page"), unseen(ASKED.replace("**Predict.** ", ""), SAID), "a paragraph that begins"),
    ("predictions", unseen(ASKED, code("x = 1"), SAID), unseen(ASKED, SAID, "Text.", SAID), "a paragraph that begins"),
    ("predictions", unseen(ASKED, SAID), unseen(ASKED.replace("predict", "aside"), SAID), "its answer in"),
    ("predictions", unseen(ASKED, SAID), unseen(ASKED, code("print(2)", "predicted")), "prints no line"),
    ("predictions", page_of(ASKED, SAID, outputs=[printed("predicted 2 · measured 2\n")]),
     page_of(ASKED, SAID, outputs=[printed("predicted 2, measured 2\n")]), "prints no line"),
    ("predictions", "\n\n".join([ASKED, MESH, ASKED, COMPUTED]) and unseen(MESH, ASKED, COMPUTED),
     page_of(ASKED, SAID, outputs=[printed(f"predicted {'2' * 50} · measured 2\n")]), "a phone shows 60"),
    ("predictions", unseen(MESH, ASKED, COMPUTED), unseen(ASKED, COMPUTED), "no such mesh"),
    ("predictions", unseen(MESH, ASKED, COMPUTED), unseen(MESH, ASKED, SAID, code("x", "rerun")), "tag it predicted too"),
    ("predictions", unseen(MESH, ASKED, COMPUTED), unseen(MESH, ASKED, code("print('predicted measured')", "predicted", "rerun")), "take the tag away"),
    ("folded-text", ASKED, ASKED.replace("</summary>\n\n", "</summary>\n"), "Colab misreads"),
    ("folded-text", ASKED.replace("predict", "aside"), ASKED.replace("predict", "other"), "Colab misreads"),
    ("folded-text", "`<details>` is a tag", "A\n\n</details>", "without its other half"),
    ("plain-python", code("x"), code("!pip install x"), "not plain Python"),
    ("known-tags", code("x", "hide-cell"), code("x", "hide-cel"), "hide-cel"),
    ("known-tags", code("x", "proof", "stored", "id-a-2", "rerun", "lesson", "from-quickstart"), code("x", "id-A"), "id-A"),
    ("known-tags", code("x", "predicted"), code("x", "predict"), "KNOWN_TAGS"),
    ("same-bytes", code((ROOT / "book/cells/setup.py").read_text("utf-8").strip("\n"), "setup"),
     code("import jax ", "setup"), "not the bytes"),
    ("same-bytes", "# A", code("", "shared-none"), "is missing"),
    ("setup-is-second", ["# A", SETUP], ["# A", code("import jax")], "second cell"),
    ("setup-is-second", ["# A", SETUP], ["# A", code("x", "setup", "hide-cell")], "cellView"),
    ("setup-is-second", ["# A", SETUP], ["# A", SETUP, SETUP], "second setup cell"),
    ("setup-is-second", page_of("# A", code("import jax", "from-a"), kind="page"),
     page_of("# A", code("import jax"), kind="page"), "second cell"),
    ("enough-words", "word " * 1500, "Few words.", "2 words"),
    ("setup-is-second", page_of("# A", kind="reference"), page_of("# A", code("x"), kind="reference"), "second cell"),
    ("short-sentences", page_of(LONG, kind="reference"), page_of(LONG, code("x"), kind="reference"), "make two"),
    ("enough-words", page_of("Few.", code("x"), kind="reference"), page_of("word " * 3501, code("x"), kind="reference"), "3501"),
    ("exercise-cells", page_of(code("x"), kind="reference"), page_of(STUB, kind="reference"), "solution-a"),
    ("enough-words", page_of("Few words.", kind="page"), page_of("word " * 3501, kind="page"), "3501 words"),
    ("short-sentences", "Short. `a.b` e.g. this.", LONG, "average sentence"),
    ("short-sentences", "Short.", LONG + " Short." * 9, "make two"),
    ("cells-translate", "| a | b |\n|---|---|\n| 1: J | - |", "| a | b |\n|---|---|\n| x | 1. J |", "begins as a list"),
    ("short-paragraphs", "One. Two. Three. Four. Five. Six.", "One. Two. Three. Four. Five. Six. Seven.", "7 sentences"),
    ("short-paragraphs", "> [!NOTE]\n> **A.** B. C. D. E. F.", "> [!NOTE]\n> **A.** B. C. D. E. F. G.", "7 sentences"),
    ("plain-words", "This is true: `just`.", "This is simply true.", "simply"),
    ("plain-words", 'It says "simply initialized".', "Initialized.", "American"),
    ("plain-words", "| A | b |\n|---|---|\n| c | d |", "| Obviously | b |\n|---|---|\n| c | d |", "Obviously"),
    ("plain-words", "Initialise, materialize.", "We initialize it.", "American"),
    ("layout-is-memory", "Its layout in memory.", "Its layout is by rows.", "order in memory"),
    ("sentence-case", "## What JAX says: `P`", "## A Mesh of Devices", "Mesh, Devices"),
    ("sentence-case", "## A mesh?", "## A mesh.", "ends with a point"),
    ("alt-text", "![Eight devices in rows](https://a.b/c.svg)", "![](https://a.b/c.svg)", "no alt text"),
    ("alt-text", "# A", "![mesh.svg](https://a.b/c.svg)", "file name"),
    ("alt-text", "# A", '<img src="c.svg">', "no alt text"),
    ("alt-text", "# A", "![A mesh](https://a.b/c.svg)", "conclusion"),
    ("badge", TITLE, code("x"), "begins with"),
    ("badge", page_of("# A title", kind="page"), page_of("# A title", code("x"), kind="page"), "Colab badge"),
    ("badge", TITLE, TITLE.replace("99-toy.ipynb", "98.ipynb"), "Colab badge"),
    ("opening", TITLE, TITLE.replace("**Question", "Question"), "one bold"),
    ("opening", TITLE, TITLE.replace("**You need**", "You"), "You need"),
    ("opening", TITLE, TITLE.replace("- run\n", "- run\n" * 5), "5 verbs"),
    ("closing", CLOSING, CLOSING.replace("- a\n", "- a\n" * 6), "6 takeaways"),
    ("closing", CLOSING, "# A", "no heading Exercises"),
    ("portable", "A [page](https://a.b/c_(d)), `x`, $a_{b} < c$ and ## no heading.", "(label)=\n## A", "MyST target"),
    ("portable", "A {ref} and `label`.", "See {ref}`label`.", "MyST role"),
    ("portable", "```text\nA\n```", "```{note}\nA\n```", "MyST directive"),
    ("portable", "> [!NOTE]\n> **A**", ":::{note}\nA\n:::", "MyST directive"),
    ("portable", "[a](https://a.b)", "[a](02-variables.md)", "Colab cannot follow"),
    ("portable", "[a](https://a.b#c)", "[a](#section)", "Colab cannot follow"),
    ("portable", "![a picture](https://a.b/a.png)", "![a picture](a.png)", "Colab cannot follow"),
    ("portable", "# A", "[a][b]\n\n[b]: https://a.b", "reference link"),
    ("portable", "# A", "[](https://a.b)", "without text"),
    ("portable", "# A", "A[^1].\n\n[^1]: B", "footnote"),
    ("portable", "`<sub>`", "A<sub>1</sub>", "raw HTML"),
    ("portable", ASKED, "<table><tr></tr></table>", "raw HTML"),
    ("portable", "`f32[8]{V:data}`", '<details open class="predict">', "raw HTML"),
    ("portable", page_of("{ref}`a`", kind="page"), page_of("{ref}`a`", code("x"), kind="page"), "MyST role"),
    ("portable", "`{{ x }}`", "A {{ version }}", "substitution"),
    ("portable", "$x$", "A \\(x\\)", "dollar signs"),
    ("portable", "90% of it", "A\n\n% hidden", "comment"),
    ("alerts", "> [!NOTE]\n> **Mind** this.", "> [!NOTE]\n> Plain.", "bold word"),
    ("alerts", "> A quotation.", "> [!HINT]\n> **A.**", "no alert"),
    ("alerts", "# A", "> [!NOTE] Title\n> **A.**", "alone on its line"),
    ("one-title", ["# A", "## B", code("# no heading"), "### C"], ["# A", "# B"], "second title"),
    ("one-title", "# A\n\n```\n# B\n```", "# A\n\n### B", "skips a level"),
    ("exercise-cells", [STUB, CHECK, SOLVED], code("x"), "no exercise"),
    ("exercise-cells", page_of(code("x"), kind="page"), page_of(STUB, kind="page"), "solution-a"),
    ("exercise-cells", [STUB, CHECK, SOLVED], [STUB, CHECK], "solution-a"),
    ("exercise-cells", [STUB, CHECK, SOLVED], [CHECK, STUB, SOLVED], "order"),
    ("exercise-cells", [STUB, CHECK, SOLVED], [code("pass", "exercise-a"), CHECK, SOLVED], "the stub does not define"),
    ("exercise-cells", [STUB, CHECK, SOLVED], [STUB, code("pass", "check-a"), SOLVED], "does not define check_a"),
    ("exercise-cells", [STUB, CHECK, SOLVED], [STUB, CHECK, code("answer_a = 1", "solution-a")], "is folded"),
    ("quiet", ran(printed("fine, at 2×4")), ran(printed("noise", "stderr")), "stderr"),
    ("quiet", ran(), ran(printed("DeprecationWarning: old")), "warning"),
    ("quiet", ran(printed("older: UserWarning: old")), ran(printed("a.py:3: UserWarning: old")), "warning"),
    ("quiet", ran(), ran(nbformat.v4.new_output("error", ename="E", evalue="v", traceback=[])), "fails"),
    ("same-next-time", ran(printed("0x7f")), ran(printed("<function f at 0x7f12345678>")), "address in memory"),
    ("same-next-time", ran(printed("12:34:56"), tags=["timing"]), ran(printed("12:34:56")), "time of day"),
    ("same-next-time", ran(), ran(printed("/tmp/ipykernel_12/3.py")), "temporary path"),
    ("same-next-time", ran(printed("2026")), ran(printed("2026-11-20")), "date"),
    ("same-next-time", ran(printed("compiled for H100, on 2026-11-20")), ran(printed("on 2026-11-20")), "date"),
    ("same-next-time", ran(), ran(printed("/home/" + "me/x.py")), "one machine"),
    *[("described-pictures", ran(shown(text_html=SVG)), ran(shown(**{kind: data})), "a picture of this cell")
      for kind, data in [("text_html", "<svg></svg>"), ("text_html", '<svg aria-label="x.svg">'),
                         ("text_html", '<img src="x">'), ("image_png", "AAAA"), ("image_svg+xml", "<svg></svg>")]],
    *[("message-entries", good, bad, piece) for good, bad, piece in [
        (entry(), entry("## SumError"), "quote it in code form"),
        (entry("## A word before", (), "Text.", "", "other"), entry(tags=()), "tag it id-SLUG"),
        (entry(tags=("id-a",)), entry(proven=code("x")), "no strip"),
        (entry(), entry(links="[a](https://github.com/o/r/issues/1)"), "no link to what teaches it"),
        (entry(), entry(links=f"[a]({BOOK.page_url('book/glossary')}) https://github.com/o/r/pull/1"), "no link to what teaches"),
        (entry(), entry(links=f"[a]({BOOK.page_url('book/01-mesh')}) https://github.com/o/r"), "no link to a public thread"),
        (entry("## `SumError … 8 times, but … 10`"), entry("## `SumError … 8 times, but 11`"), "'8 times, but 11' stands in no"),
        (entry("## `SumError` at 10: `8 times,`"), entry("## `SumError … 9`", proven=code("'9'")), "'9' stands in no output"),
        (entry("## `SumError … 9`", proven=proof("assert x == 'of 9'")), entry("## `SumError … 9`", proven=proof("assert x == 9")), "'9'"),
    ]],
    *[("real-names", [code("x = 1\nP('data')\nf = 1"), f"Use `{good}`."], [code("x = 1\nf = 1"), f"Use `{bad}`."], bad)
      for good, bad in [
          ("jax.jit", "jax.sharding.used_mesh"), ("nnx.Param", "nnx.Parm"), ("@jax.jit", "jax.jit_all(f)"),
          ("jax.make_mesh(…)", "make_messh"), ("x.sharding", "x.shardin"), ("donate_argnums=", "frobnicate="),
          ("P('data')", "P(dta)"), ("jax.jit(f, static_argnums=1)", "jax.jit(f, static_argnms=1)"),
          ("pyproject.toml", "pyprojekt.toml"), ("make site", "make sight"), ("_build/html", "build/html"),
          ("bookkit sync --check", "bookkit sync --chek"), ("python -m bookkit lint", "bookkit lind")]],
    *[("real-names", [code("x = 1\nP('data')"), f"Use `{good}`."], [code("x"), "`frobnicate`"], "frobnicate")
      for good in ("x", "x = 1", "None", "(2, 4)", "jax.Array.sharding", "NamedSharding", "8")],
]


def as_page(given):
    return given if isinstance(given, Page) else page_of(*([given] if isinstance(given, str) else given))


@pytest.mark.parametrize("rule, good, bad, piece", PAGES, ids=[f"{rule}-{piece}" for rule, *_, piece in PAGES])
def test_rule(rule, good, bad, piece):
    assert not (said := [str(one) for one in of_page(as_page(good), [RULES[rule]])]), said
    page = as_page(bad)
    found = list(of_page(page, [RULES[rule]]))
    last = page.chapter.cells[-1].line + len(page.chapter.cells[-1].lines)
    assert any(piece in str(one) for one in found), f"{rule} does not see it: {found}"
    assert all(str(one).startswith(f"book/{page.chapter.name}.md:") and 1 <= one.line <= last for one in found)


def test_a_finding_names_the_line():
    page = page_of("# A", code("x = 1\ny = 2  # " + "long " * 20), "Fine.\n\nThis is simply true.")
    text = FRONT.split("\n") + ["# A", "", "```{code-cell} ipython3", "x = 1"]
    found = {one.rule: one.line for one in of_page(page, RULES.values())}
    assert found["narrow-lines"] == len(text) + 1 and found["plain-words"] == len(text) + 6


def test_without_an_execution_of_this_code_the_rule_says_so():
    page = page_of("# A", code("x"), "`frobnicate`")
    page.__dict__["executed"] = None
    found = [one.rule for one in of_page(page, RULES.values()) if one.rule in ("executed", "real-names")]
    assert found == ["executed"]


# rule, a text that it passes, a text that it must see, what the message says
THERE = BOOK.page_url(BOOK.pages[0])
TEXTS = [
    *[("finished-text", "fine\nto do\n", f"fine\n{bad}\n", piece) for bad, piece in [
        ("TO" + "DO: write", "unfinished"), ("see /ho" + "me/me/x", "one machine"),
        ("Lorem " + "ipsum", "filler"), ("<<<<<<" + "< HEAD", "merge"), ("http://local" + "host:9", "address")]],
    *[("own-addresses", f"a\n[a]({THERE})", f"a\n[a]({url}).", piece) for url, piece in [
        (BOOK.page_url("book/77-none"), "no such page"), (THERE + "#no-such-heading", "no such heading"),
        (f"{BOOK.site}wheels/other.whl", "no such page or file"), (BOOK.colab_url("book/77-none"), "not in the repository"), (f"{BOOK.site}_static/none.svg", "site/static"),
        (f"{BOOK.repo}/blob/{BOOK.ref}/none.py", "not in the repository")]],
    *[("one-address", f"a\n{good}", f"a\n{bad}", "make publish-as") for good, bad in [
        (THERE, "https://other.example/book/01-mesh.html"),
        (BOOK.colab_url("book/01-mesh"), BOOK.colab_url("book/01-mesh").replace(f"/{BOOK.ref}/", "/v0/")),
        (f"{BOOK.site}_static/colab-badge.svg", "https://other.example/_static/colab-badge.svg"),
        (f"{BOOK.site}wheels/meshscope-0.1.0-py3-none-any.whl", "https://other.example/wheels/meshscope-0.1.0-py3-none-any.whl"),
        (f'SITE = "{BOOK.site}"', 'SITE = "https://other.example/"'),
        (f'"SITE = \\"{BOOK.site}\\"\\n",', '"SITE = \\"https://other.example/\\"\\n",'),
        ("meshscope @ {WHEEL}", f"meshscope @ git+{BOOK.repo}@main"),
        (BOOK.repo, "https://github.com/other/" + BOOK.repo.split("/")[-1])]],
]


@pytest.mark.parametrize("rule, good, bad, piece", TEXTS, ids=[f"{rule}-{piece}-{bad[2:30]}" for rule, _, bad, piece in TEXTS])
def test_rule_of_text(rule, good, bad, piece):
    assert not list(of_text("a.md", good, BOOK, [RULES[rule]]))
    found = list(of_text("a.md", bad, BOOK, [RULES[rule]]))
    assert any(piece in one.what and one.line == 2 for one in found), found


# The book as a whole: a copy of three pages, then with one thing wrong.

TOY = FRONT + "\n# A\n\n" + "\n\n".join([STUB, CHECK, SOLVED]) + "\n"
FILES = {
    "_toc.yml": "format: jb-book\nroot: book/00-intro\nchapters: [file: book/01-a, file: book/02-b]\n",
    "book/00-intro.md": "# Intro\n\nWe choose Auto, see [a](https://a.b).\n",
    "book/01-a.md": TOY,
    "book/02-b.md": TOY,
    "tests/names.toml": "",
    "tests/rows.toml": '[A1]\nkind = "judgement"\nchapters = ["00-intro"]\ncan = "choose"\n'
                       '[A2]\nkind = "asserted"\nchapters = ["01-a", "02-b"]\ncan = "count"\n',
    "tests/pages/00-intro.toml": '[[row]]\nid = "A1"\ntext = "We choose Auto"\nsource = "https://a.b"\n',
    "tests/pages/02-b.toml": '[exercise.a]\nwrong = "answer_a = 2"\nwhy = "no"\n[[row]]\nid = "A2"\ncells = ["sure"]\n'
                             '[[fault]]\nname = "n"\nrows = ["A2"]\nfind = "answer_a = None"\nreplace = "answer_a = 2"\n'
                             'fails = "sure"\n',
    "tests/pages/01-a.toml": '[exercise.a]\nwrong = "answer_a = 2"\nwhy = "no"\n[[fault]]\nname = "n"\nrows = ["A2"]\n'
                             'find = "answer_a = None"\nreplace = "answer_a = 2"\nfails = "sure"\n',
    "CHANGELOG.md": "# Changelog\n\n## 0.2.0 (2026-11-30)\n\n- New.\n\n## 0.1.0 (2026-11-02)\n",
    "CITATION.cff": "version: 0.2.0\ndate-released: 2026-11-30\n",
    "src/meshscope/__init__.py": '__version__ = "0.2.0"\n',
}
FILES["book/02-b.md"] = TOY + "\n" + proof("assert answer_a == 1", "sure") + "\n"
FILES["book/01-a.md"] = FILES["book/02-b.md"]


@pytest.fixture
def small(tmp_path):
    (tmp_path / "_config.yml").write_text((ROOT / "_config.yml").read_text("utf-8").replace(
        "zh_TW: {name", "ja: {name").replace("zh-TW/", "ja/"), "utf-8")
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text, "utf-8")
    (tmp_path / "requirements.txt").write_text("jax==0.1\n")
    (tmp_path / "Makefile").write_text("site:\n")
    sync.main([], tmp_path)
    return Book(tmp_path)


def rewrite(book, name, old, new):
    path = book.root / name
    text = path.read_text("utf-8")
    assert old in text
    path.write_text(text.replace(old, new), "utf-8")


# rule, file, what stands there, what stands there instead, what the message says
BOOKS = [
    ("contents", "_toc.yml", "file: book/02-b", "file: book/03-c", "there is no book/03-c.md"),
    ("contents", "_toc.yml", ", file: book/02-b", "", "not in _toc.yml"),
    ("contents", "_toc.yml", "01-a, file: book/02-b", "02-b, file: book/01-a", "out of order"),
    ("contents", "book/00-intro.md", "# Intro", "# Intro\n\n```{code-cell} ipython3\n1\n```", "no kernelspec"),
    ("contents", "book/00-intro.md", "# Intro", FRONT + "# Intro", "no code"),
    ("pairs", "notebooks/01-a.ipynb", "answer_a = None", "answer_a = 0", "cell 2 is not that"),
    ("pairs", "notebooks/01-a.ipynb", '"exercise-a"', '"setup"', "cell 2 is not that"),
    ("pairs", "notebooks/01-a.ipynb", '"cell_type": "code"', '"cell_type": "raw"', "cell 2 is not that"),
    ("pairs", "notebooks/01-a.ipynb", '"execution_count": null', '"execution_count": 3', "an execution left"),
    ("pairs", "notebooks/ja/01-a.ipynb", '"outputs": []', '"outputs": [{"output_type": "stream", "name": "stdout", "text": "1"}]', "an execution left"),
    ("pairs", "notebooks/01-a.ipynb", '"tags": [', '"execution": {}, "tags": [', "cell 2 is not that"),
    ("pairs", "notebooks/ja/01-a.ipynb", "answer_a = None", "answer_a = 0", "cell 2 is not that"),
    ("pairs", "book/01-a.md", "# A", "# A\n\n```{code-cell} ipython3\n1\n```", "fewer cells"),
    ("answers-listed", "tests/pages/01-a.toml", "wrong =", "whose =", "needs `wrong`"),
    ("answers-listed", "tests/pages/02-b.toml", "why =", "who =", "tests/pages/02-b.toml:1: [exercise.a] needs `wrong`"),
    ("answers-listed", "tests/pages/02-b.toml", "[exercise.a]", "[exercise.b]", "[exercise.b] has no exercise"),
    ("names-listed", "tests/names.toml", "", '[odd]\n', "[odd] is no kind"),
    ("names-listed", "tests/names.toml", "", '[shell]\n"make nothing" = "it"\n', "no target nothing"),
    ("names-listed", "tests/names.toml", "", '[hlo]\n"all-gather" = "XLA"\n', "no page says it"),
    ("faults-and-rows", "tests/pages/01-a.toml", 'fails = "sure"', 'survives = "why"', "not covered in 01-a"),
    ("faults-and-rows", "tests/pages/01-a.toml", '"A2"', '"Z9"', "no row Z9"),
    ("faults-and-rows", "tests/pages/01-a.toml", 'rows = ["A2"]\n', "", "01-a / n: no `rows`"),
    ("faults-and-rows", "tests/pages/00-intro.toml", "We choose Auto", "We choose Explicit", "0 times"),
    ("faults-and-rows", "tests/pages/02-b.toml", 'cells = ["sure"]', 'cells = ["none"]', "has the tag id-none"),
    ("faults-and-rows", "tests/pages/02-b.toml", 'fails = "sure"', 'fails = "none"', "tests/pages/02-b.toml:1: 02-b / n: `fails` names id-none"),
    ("faults-and-rows", "tests/pages/02-b.toml", '["A2"]', '[]', "A2 in 02-b has no fault in tests/pages/02-b.toml"),
    ("faults-and-rows", "tests/pages/02-b.toml", 'find = "answer_a = None"', 'find = "assert answer_a == 1"', "`find` occurs 0 times"),
    ("faults-and-rows", "tests/pages/02-b.toml", 'cells = ["sure"]', "", None),
    ("one-table-a-page", "tests/pages/02-b.toml", "why =", "who =", "exercise a: nothing reads who"),
    ("one-table-a-page", "tests/pages/02-b.toml", "[exercise.a]", "[answer.a]", "nothing reads [answer]"),
    ("one-table-a-page", "tests/pages/02-b.toml", 'rows = ["A2"]\n', "", "fault n: it lacks rows"),
    ("one-table-a-page", "tests/pages/02-b.toml", 'fails = "sure"', "", "give `fails`"),
    ("one-table-a-page", "tests/pages/02-b.toml", 'id = "A2"', "", "row None: it lacks id"),
    ("one-release", "CHANGELOG.md", "0.2.0", "0.3.0", "version 0.2.0, but CHANGELOG.md has 0.3.0"),
    ("one-release", "CHANGELOG.md", "2026-11-30", "unreleased", "date-released is 2026-11-30, but CHANGELOG.md says that 0.2.0 is unreleased"),
    ("one-release", "CHANGELOG.md", "## 0", "# 0", "names no release"),
    ("one-release", "CITATION.cff", "date-released: 2026-11-30", "", "date-released is None"),
    ("one-release", "src/meshscope/__init__.py", "0.2.0", "0.2.1", "__version__ is 0.2.1"),
]


def test_a_small_book_passes(small):
    assert not [str(one) for one in of_book(small, [one for one in RULES.values() if WHOLE in one.kinds])]


@pytest.mark.parametrize("rule, name, old, new, piece", BOOKS, ids=[f"{rule}-{piece}" for rule, *_, piece in BOOKS])
def test_rule_of_the_book(small, rule, name, old, new, piece):
    names.listed_names.cache_clear()
    path = small.root / name
    if old:
        rewrite(small, name, old, new)
    else:
        path.write_text(new, "utf-8")
    found = [str(one) for one in of_book(Book(small.root), [RULES[rule]])]
    names.listed_names.cache_clear()
    assert any(piece in one for one in found) if piece else not found, found


def test_notebooks_that_are_gone_or_belong_to_nobody_are_named(small):
    (small.root / "notebooks" / "01-a.ipynb").rename(small.root / "notebooks" / "07-none.ipynb")
    said = "\n".join(map(str, of_book(small, [RULES["pairs"]])))
    assert "01-a.ipynb:1: it is missing" in said and "07-none.ipynb:1: it belongs to no chapter" in said


def test_every_rule_is_shown_something_bad():
    """`executed` above, `pinned-wheel` in test_served_wheel.py."""
    blind = set(RULES) - {"executed", "pinned-wheel"} - {rule for rule, *_ in [*PAGES, *TEXTS, *BOOKS]}
    assert not blind, f"show these rules something bad: {blind}"


def test_a_rule_says_what_it_wants_and_which_kinds_it_binds(capsys):
    for rule in RULES.values():
        assert rule.about and len(rule.about) < 100 and set(rule.kinds) <= {*KINDS, TEXT, WHOLE}, rule.id
    assert command.main(["--rules"]) == 0
    said = capsys.readouterr().out
    assert all(f"{rule.id} " in said and rule.about in said for rule in RULES.values())
    other = dataclasses.replace(RULES["narrow-lines"], kinds=("page",))
    assert not list(of_page(page_of(code("x" * 200)), [other]))  # it does not bind chapters


def test_the_command_names_files_and_ends_with_one(tmp_path, capsys, monkeypatch):
    bad = ROOT / "book" / "00-intro.md"
    assert command.main([str(bad)]) == 0
    monkeypatch.setattr(command, "committed", lambda book: [bad])
    monkeypatch.setitem(RULES, "never", dataclasses.replace(
        RULES["one-title"], id="never", check=lambda page: iter([(3, "no: do it")])))
    assert command.main(["--rule", "never"]) == 1
    assert "book/00-intro.md:3: no: do it [never]\n1 to mend" in capsys.readouterr().out
    for wrong, piece in ([str(tmp_path / "x.md")], "no file of the book"), (["--rule", "nevr"], "No rule nevr"):
        with pytest.raises(Problem, match=piece):
            command.main(wrong)


# What rules count and read.


def test_cells_and_their_lines_are_read():
    read = parse("01-a", FRONT + "\n# A\n\n```{code-cell} ipython3\n:tags: [mesh, hide-cell]\n:cellView: form\n\nx = 1\n```\n")
    assert [(cell.kind, cell.source, cell.tags) for cell in read.cells] == [
        ("markdown", "# A", ()), ("code", "x = 1", ("mesh", "hide-cell"))]
    assert read.cells[1].metadata["cellView"] == "form"
    assert [cell.line for cell in read.cells] == [FRONT.count("\n") + 2, FRONT.count("\n") + 8]


def test_words_and_sentences_are_counted():
    assert len(words("Four words, `a b c` and $x + y$.")) == 5
    assert len(sentences("`a.b` is one, e.g. here. `c` is two! $x$ is three? (Four.) Five 1.5 m.")) == 5


FAULTY = page_of("# A", code("rows = 16", "id-rows"), code("predicted = rows // 2"),
                 code("assert predicted == 8", "id-eight")).chapter
ROWS = {"A2": {"kind": "asserted", "chapters": [NAME], "can": "count"},
        "A1": {"kind": "judgement", "chapters": [NAME], "can": "choose"}}


@pytest.mark.parametrize("entry, piece", [
    ({"id": "A2"}, "names its cells"),
    ({"id": "A2", "noticed": ["rows"]}, "names one that asserts"),
    ({"id": "A2", "noticed": ["eight"]}, None),
    ({"id": "A2", "cells": ["none"]}, "has the tag id-none"),
    ({"id": "A2", "cells": ["rows"]}, "cannot fail"),
    ({"id": "A2", "cells": ["eight"]}, None),
    ({"id": "A9"}, "no such row"),
    ({"id": "A1"}, "quotes its sentence"),
    ({"id": "A1", "text": "none"}, "0 times"),
    ({"id": "A1", "text": "We choose Auto"}, "source"),
    ({"id": "A1", "text": "We choose Auto", "source": "https://c.d"}, "does not link"),
    ({"id": "A1", "text": "We choose Auto", "source": "https://a.b"}, None),
    ({"id": "A1", "text": "We choose Auto", "source": "rows"}, None),
])
def test_rows_see(entry, piece):
    pages = {NAME: "We choose\nAuto, see [a](https://a.b)."}
    found = "\n".join(rows.problems_of({"chapter": NAME, **entry}, ROWS.get(entry["id"]), {NAME: FAULTY}, pages))
    assert piece in found if piece else found == "", found


def test_gaps_are_seen_and_faults_fill_them():
    fault = {"chapter": NAME, "rows": ["A2"], "name": "n", "find": "rows = 16", "replace": "rows = 8",
             "fails": "eight", "file": "tests/pages/99-toy.toml"}
    assert len(list(rows.gaps([], ROWS, {NAME: ""}))) == 2 and not list(rows.gaps([], ROWS, {}))
    [row] = rows.shown_rows([], ROWS, [fault])
    assert row["noticed"] == ["eight"] and not rows.shown_rows([], ROWS, [{**fault, "survives": "x"}])
    assert len(list(rows.gaps([row], ROWS, {NAME: ""}))) == 1
    assert list(rows.without_faults([row], ROWS, [])) and not list(rows.without_faults([row], ROWS, [fault]))


def test_anchors_of_figures_tables_and_claims(tmp_path):
    picture = f"![A ring of devices]({BOOK.site}_static/figures/ring.svg)"
    table = "| a |\n|---|\n| b |\n\n*What `each` device sends in one step, in bytes. More.*"
    path = tmp_path / "a.md"
    path.write_text(FRONT + "\n\n".join(["# A title", f"In {picture.replace('ring', 'row')} a line", picture, table, proof(slug="sums")]) + "\n")
    found = {name for name in anchors(path, BOOK) if not name.startswith("jupytext")}  # of the front matter
    assert found == {"a-title", "fig-ring", "table-what-each-device-sends-in-one", "checked-sums"}
    assert static_file(BOOK, "figures/ring.svg") == ROOT / "book" / "figures" / "ring.svg"
    assert static_file(BOOK, "colab-badge.svg").exists()


def test_anchors_of_entries(tmp_path):
    """On a reference page a section is also found by the name of its first cell, as on the site."""
    book, text = Book(tmp_path), "\n\n".join([
        "# A", code("x", "id-no"), "## B\n\n```text\n## No heading\n```", code("x"), code("x", "id-second"),
        "## C\n\n### D", code("x", "id-short"), proof(slug="sums"), "## E", proof(slug="alone")])  # fmt: skip
    (tmp_path / "_toc.yml").write_text("format: jb-book\nroot: book/a\nparts:\n"
                                       "  - caption: Reference\n    chapters:\n      - file: book/b\n")
    for name in ("a", "b"):
        (tmp_path / "book").mkdir(exist_ok=True)
        (tmp_path / "book" / f"{name}.md").write_text(FRONT + text + "\n")
    read, of_a_page = {"a", "b", "c", "d", "e"}, {"checked-sums", "checked-alone"}
    found = {name: {one for one in anchors(tmp_path / "book" / f"{name}.md", book) if not one.startswith("jupytext")}
             for name in ("a", "b")}  # fmt: skip
    assert found == {"a": read | of_a_page, "b": read | of_a_page | {"short"}}


def test_asserting_cells_are_told_apart():
    def can_fail(source, *tags):
        return rows.asserts(page_of(code(source, *tags)).chapter.code[0])

    assert can_fail("assert x") and can_fail("x", "raises-exception")
    assert can_fail("ms.assert_no_full_copy(c, t)") and can_fail("raise AssertionError('no')")
    assert not can_fail("print('assert')") and not can_fail("# assert x")


def test_listed_names_are_checked():
    table = {
        "gone": {"jax.jit": "renamed", "use_mesh": "removed", "jax.pmapped": ""},
        "newest-only": {"jax.none": "new"},
        "flag": {"--xla_no_such_flag=1": "?", "JAX_NO_SUCH": "?"},
        "quoted": {"it failed": "somebody saw it"},
    }
    found = "\n".join(names.wrong_entries(table, True, {"site"}))
    for piece in ("so it is not gone", "whole dotted name", "say why", "does not import on the newest",
                  "does not know xla_no_such_flag", "no option of jax.config", "public thread"):
        assert piece in found, piece
    good = {
        "gone": {"jax.sharding.use_mesh": "removed in 0.9"},
        "shell": {"make site": "builds"},
        "flag": {"--xla_force_host_platform_device_count=8": "XLA", "JAX_NUM_CPU_DEVICES": "env"},
        "quoted": {"it failed": "owner/a.b-c#12, on GPUs"},
    }
    assert not list(names.wrong_entries(good, True, {"site"})) and list(names.names_in_vain(good, set()))
