"""No check is blind: each is shown something bad, made up here, and must say what is wrong."""

import os
import subprocess
import time

import nbformat
import pytest

import rules
import test_coverage
import test_execution
import test_exercises
import test_names
import test_pairs
import test_portable
import test_predictions
import test_public_text
import test_setup_cell
import test_style
import test_toc
from bookkit.lint import faults
from bookkit.lint.prose import sentences, words
from bookkit.lint.rows import asserts, gaps, problems_of, without_faults
from bookkit.model.chapter import Cell, Chapter, parse
from bookkit.run.cells import as_jobs, run_jobs
from bookkit.run.offline import Problem, execute_cut, first_difference
from bookkit.site import links
from rules import BOOK

colab, page = test_style.addresses("99-bad")
TITLE = (
    f"# A title\n\n[![Open in Colab]({BOOK.site}_static/colab-badge.svg)]({colab}) "
    f"[Read]({page})\n\n**Question? Answer.**\n\n**You will**\n\n- run\n\n**You need** Python."
)


def text(source):
    return ("markdown", source, (), {})


def code(source, *tags, **metadata):
    return ("code", source, tags, metadata)


def chapter(*cells):
    return Chapter(
        "99-bad",
        tuple(
            Cell(index, kind, source, tuple(tags), metadata, "99-bad")
            for index, (kind, source, tags, metadata) in enumerate(cells, 1)
        ),
    )


SETUP = code("import jax", "setup", "hide-cell", cellView="form")
LONG = " ".join(["word"] * 46) + "."
STUB = code("answer_a = None", "exercise-a")
CHECK = code("def check_a(answer):\n    return 'not yet'\ncheck_a(answer_a)", "check-a")
SOLVED = code(
    "# @title Solution\nanswer_a = 1\ncheck_a(answer_a)", "solution-a", "hide-cell", cellView="form"
)

# rule, a bad chapter, what the message must contain
BAD = [
    (test_style.narrow_lines, chapter(code("x = 1  # " + "long " * 20)), "cell 1, line 1"),
    (test_style.short_cells, chapter(code("x = 1\n" * 31)), "split it"),
    (test_style.short_cells, chapter(code("x = 1\n" * 7)), "median"),
    (test_style.short_cells, chapter(*[code("x = 1\n" * 17)] * 2, *[code("x")] * 9), "a tenth may"),
    (test_style.few_cells, chapter(*[code("x")] * 46), "45 are the limit"),
    (test_style.few_cells, chapter(*[code("x", "timing")] * 3), "third cell tagged timing"),
    (test_style.plain_python, chapter(code("!pip install x")), "not plain Python"),
    (test_style.known_tags, chapter(code("x", "hide-cel")), "hide-cel"),
    (test_style.enough_words, chapter(text("Few words.")), "2 words"),
    (test_style.short_sentences, chapter(text(LONG)), "average sentence"),
    (test_style.short_sentences, chapter(text(LONG + " Short." * 9)), "make two"),
    (test_style.short_paragraphs, chapter(text("One. Two. Three. Four. Five.")), "5 sentences"),
    (test_style.short_paragraphs, chapter(text("> [!NOTE]\n> **A.** B. C. D. E.")), "5 sentences"),
    (test_style.plain_words, chapter(text("This is simply true.")), "simply"),
    (test_style.plain_words, chapter(text("| Obviously | b |\n|---|---|\n| c | d |")), "Obviously"),
    (test_style.plain_words, chapter(text("We initialize it.")), "American"),
    (test_style.layout_is_memory, chapter(text("Its layout is by rows.")), "order in memory"),
    (test_style.headings_in_sentence_case, chapter(text("## A Mesh of Devices")), "Mesh, Devices"),
    (test_style.headings_in_sentence_case, chapter(text("## A mesh.")), "ends with a point"),
    (test_style.alt_text, chapter(text("![](https://a.b/c.svg)")), "no alt text"),
    (test_style.alt_text, chapter(text("![mesh.svg](https://a.b/c.svg)")), "file name"),
    (test_style.alt_text, chapter(text('<img src="c.svg">')), "no alt text"),
    (test_style.alt_text, chapter(text("![A mesh](https://a.b/c.svg)")), "conclusion"),
    (test_style.opening, chapter(code("x")), "begins with"),
    (test_style.opening, chapter(text("# A title")), "Colab badge"),
    (test_style.opening, chapter(text(TITLE.replace("99-bad.ipynb", "98.ipynb"))), "Colab badge"),
    (test_style.opening, chapter(text(TITLE.replace("**Question", "Question"))), "one bold"),
    (test_style.opening, chapter(text(TITLE.replace("**You need**", "You"))), "You need"),
    (test_style.opening, chapter(text(TITLE.replace("- run\n", "- run\n" * 5))), "5 verbs"),
    (test_style.setup_is_second, chapter(text("# A"), code("import jax")), "second cell"),
    (test_style.setup_is_second, chapter(text("# A"), code("x", "setup", "hide-cell")), "cellView"),
    (test_style.setup_is_second, chapter(text("# A"), SETUP, SETUP), "second setup cell"),
    (test_style.closing, chapter(text("## Takeaways\n\n" + "- a\n" * 6)), "6 takeaways"),
    (test_style.closing, chapter(text("# A")), "no heading Exercises"),
    (test_portable.portable, chapter(text("(label)=\n## A")), "MyST target"),
    (test_portable.portable, chapter(text("See {ref}`label`.")), "MyST role"),
    (test_portable.portable, chapter(text("```{note}\nA\n```")), "MyST directive"),
    (test_portable.portable, chapter(text(":::{note}\nA\n:::")), "MyST directive"),
    (test_portable.portable, chapter(text("[a](02-variables.md)")), "Colab cannot follow"),
    (test_portable.portable, chapter(text("[a](#section)")), "Colab cannot follow"),
    (test_portable.portable, chapter(text("![a picture](a.png)")), "Colab cannot follow"),
    (test_portable.portable, chapter(text("[a][b]\n\n[b]: https://a.b")), "reference link"),
    (test_portable.portable, chapter(text("[](https://a.b)")), "without text"),
    (test_portable.portable, chapter(text("A[^1].\n\n[^1]: B")), "footnote"),
    (test_portable.portable, chapter(text("A<sub>1</sub>")), "raw HTML"),
    (test_portable.portable, chapter(text("A {{ version }}")), "substitution"),
    (test_portable.portable, chapter(text("A \\(x\\)")), "dollar signs"),
    (test_portable.portable, chapter(text("A\n\n% hidden")), "comment"),
    (test_portable.alerts, chapter(text("> [!NOTE]\n> Plain.")), "bold word"),
    (test_portable.alerts, chapter(text("> [!HINT]\n> **A.**")), "no alert"),
    (test_portable.alerts, chapter(text("> [!NOTE] Title\n> **A.**")), "alone on its line"),
    (test_portable.one_title, chapter(text("# A"), text("# B")), "second title"),
    (test_portable.one_title, chapter(text("# A"), text("### B")), "skips a level"),
    (test_exercises.anatomy_of_exercises, chapter(code("x")), "no exercise"),
    (test_exercises.anatomy_of_exercises, chapter(STUB, CHECK), "solution-a"),
    (test_exercises.anatomy_of_exercises, chapter(CHECK, STUB, SOLVED), "order"),
    (
        test_exercises.anatomy_of_exercises,
        chapter(code("pass", "exercise-a"), CHECK, SOLVED),
        "the stub does not define",
    ),
    (
        test_exercises.anatomy_of_exercises,
        chapter(STUB, code("pass", "check-a"), SOLVED),
        "does not define check_a",
    ),
    (
        test_exercises.anatomy_of_exercises,
        chapter(STUB, CHECK, code("answer_a = 1", "solution-a")),
        "is folded",
    ),
    (test_predictions.anatomy_of_predictions, chapter(code("x")), "0 cells tagged mesh"),
    (test_predictions.anatomy_of_predictions, chapter(code("mesh = 3", "mesh")), "(2, 4)"),
    (test_predictions.anatomy_of_predictions, chapter(code("(2, 4)", "mesh")), "no prediction"),
    (test_predictions.anatomy_of_predictions, chapter(code("x = 1", "predict")), "assigns no name"),
    (
        test_predictions.anatomy_of_predictions,
        chapter(code("assert x", "predicted")),
        "asserts nothing about",
    ),
]


@pytest.mark.parametrize(
    "check, bad, piece", BAD, ids=[f"{check.__name__}-{piece}" for check, _, piece in BAD]
)
def test_rule_sees(check, bad, piece):
    messages = "\n".join(check(bad))
    assert piece in messages, f"{check.__name__} does not see it: {messages!r}"
    assert "book/99-bad.md" in messages, "a message says which file"


def test_every_rule_is_shown_something_bad():
    blind = {check.__name__ for check in rules.ALL} - {check.__name__ for check, *_ in BAD}
    assert not blind, f"show these rules a bad chapter: {blind}"


GOOD = chapter(
    text(TITLE),
    SETUP,
    code("mesh = make((2, 4))", "mesh"),
    code("predicted = mesh", "predict"),
    code("assert predicted == mesh", "predicted"),
    STUB,
    CHECK,
    SOLVED,
    text(
        "## What `P` says\n\nA [page](https://a.b/c_(d)) and `x`, e.g. this: $a_{b} < c$.\n\n"
        "> [!NOTE]\n> **Mind** this.\n\n![Eight devices in two rows of four](https://a.b/c.svg)\n\n"
        "## Takeaways\n\n- a\n\n## In practice\n\n## Exercises\n\n## Further reading"
    ),
)


@pytest.mark.parametrize("check", rules.ALL, ids=lambda check: check.__name__)
def test_rule_accepts(check):
    """… and none of them is always offended."""
    if check is not test_style.enough_words:
        assert list(check(GOOD)) == []


# Reading.


def test_parse():
    read = parse(
        "01-a",
        "---\njupytext:\n  text_representation:\n    extension: .md\n"
        "    format_name: myst\nkernelspec:\n  name: python3\n  display_name: Python 3\n"
        "---\n\n# A\n\n"
        "```{code-cell} ipython3\n:tags: [mesh, hide-cell]\n:cellView: form\n\nx = 1\n```\n",
    )
    assert [(cell.kind, cell.source, cell.tags) for cell in read.cells] == [
        ("markdown", "# A", ()),
        ("code", "x = 1", ("mesh", "hide-cell")),
    ]
    assert read.cells[1].metadata["cellView"] == "form"


def test_counting():
    assert len(words("Four words, `a b c` and $x + y$.")) == 5
    assert (
        len(sentences("`a.b` is one, e.g. here. `c` is two! $x$ is three? (Four.) Five 1.5 m."))
        == 5
    )


# Pairs and toc.


def notebook(*sources, **cell):
    cells = [nbformat.v4.new_code_cell(source, **cell) for source in sources]
    return nbformat.v4.new_notebook(cells=cells)


@pytest.mark.parametrize(
    "other, piece",
    [
        (notebook("x = 2"), "line 1"),
        (notebook("x = 1", "y"), "2 cells"),
        (notebook(), "0 cells"),
        (notebook("x = 1", metadata={"tags": ["setup"]}), "metadata"),
        (nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("x = 1")]), "markdown"),
    ],
)
def test_pairs_see(other, piece):
    messages = "\n".join(test_pairs.differences(chapter(code("x = 1")), other, "a.ipynb"))
    assert piece in messages and "make sync" in messages


def test_leftovers_are_seen():
    output = nbformat.v4.new_output("stream", text="1")
    assert list(test_pairs.leftovers(notebook("x", outputs=[output]), "a"))
    assert list(test_pairs.leftovers(notebook("x", execution_count=1), "a"))
    assert list(test_pairs.leftovers(notebook("x", metadata={"execution": {}}), "a"))
    assert not list(test_pairs.leftovers(notebook("x"), "a"))


def test_contents_see():
    found = "\n".join(
        test_toc.contents_and_files(["book/a", "book/b", "book/b"], ["book/b.md", "book/c.md"])
    )
    assert "no book/a.md" in found and "book/c.md is not in" in found and "twice" in found


def test_addresses_are_followed():
    there = BOOK.pages[0]
    for url, piece in {
        BOOK.page_url("book/77-none"): "no book/*.md",
        BOOK.page_url(there) + "#no-such-heading": "does not have",
        BOOK.colab_url("book/77-none"): "not in the repository",
        f"{BOOK.repo}/blob/{BOOK.ref}/none.py": "not in the repository",
    }.items():
        assert piece in "\n".join(test_toc.broken(f"[a]({url}).", "a.md")), url
    assert not list(test_toc.broken(f"[a]({BOOK.page_url(there)})", "a.md"))


def test_addresses_are_followed_on_the_site(tmp_path):
    (tmp_path / "book").mkdir()
    (tmp_path / "book" / "a.html").write_text('<h2 id="b">B</h2>')
    (tmp_path / "zh-TW" / "book").mkdir(parents=True)
    (tmp_path / "zh-TW" / "book" / "a.html").write_text('<h2 id="c">C</h2>')

    def broken(url):
        return list(links.dead_addresses(f"[a]({url})", "a.md", BOOK, tmp_path))

    assert not broken(BOOK.site + "book/a.html#b") and not broken(BOOK.site + "zh-TW/book/a.html#c")
    assert broken(BOOK.site + "book/a.html#c") and broken(BOOK.site + "book/b.html")
    assert not broken("https://example.org/book/b.html")


@pytest.mark.parametrize(
    "written, found",
    [
        ("[a](https://a.b/c) and", ["https://a.b/c"]),
        ("<https://a.b/c>.", ["https://a.b/c"]),
        ("[![x](https://a.b/c.svg)](https://d.e/f)", ["https://a.b/c.svg", "https://d.e/f"]),
        ("[a](https://a.b/c_(d))", ["https://a.b/c_(d)"]),
        ("at https://a.b/c.", ["https://a.b/c"]),
    ],
)
def test_addresses_are_found(written, found):
    assert links.addresses(written) == found


# The setup cell and shared cells.


def test_copies_are_compared():
    cells = {"setup": "import jax\n", "model": "x = 1\n"}
    good = chapter(SETUP, code("x = 1", "shared-model"))
    bad = chapter(
        code("import jax ", "setup"), code("x = 2", "shared-model"), code("", "shared-no")
    )
    assert not list(test_setup_cell.copies(good, cells))
    assert len(list(test_setup_cell.copies(bad, cells))) == 3


# Execution.


def ran(*outputs, tags=()):
    return notebook("show()", outputs=list(outputs), metadata={"tags": list(tags)})


def printed(words, name="stdout"):
    return nbformat.v4.new_output("stream", name=name, text=words)


@pytest.mark.parametrize(
    "output, piece",
    [
        (printed("noise", "stderr"), "stderr"),
        (printed("DeprecationWarning: old"), "warning"),
        (printed("<function f at 0x7f12345678>"), "address in memory"),
        (printed("/tmp/ipykernel_12/3.py"), "temporary path"),
        (printed("2026-11-20"), "date"),
        (printed("/home/me/x.py"), "one machine"),
        (printed("12:34:56"), "time of day"),
        (nbformat.v4.new_output("error", ename="E", evalue="v", traceback=[]), "fails"),
    ],
)
def test_stray_output_is_seen(output, piece):
    assert piece in "\n".join(test_execution.stray("99-bad", ran(output)))
    assert not list(test_execution.stray("99-bad", ran(printed("fine, at 2×4"))))


@pytest.mark.parametrize(
    "data",
    [
        {"text/html": "<svg></svg>"},
        {"text/html": '<svg aria-label="x.svg">'},
        {"text/html": '<img src="x">'},
        {"image/png": "AAAA"},
        {"image/svg+xml": "<svg></svg>"},
    ],
)
def test_undescribed_pictures_are_seen(data):
    output = nbformat.v4.new_output("display_data", data=data)
    assert list(test_execution.undescribed("99-bad", ran(output)))


def test_described_pictures_pass():
    data = {"text/html": "<svg aria-label=\"P('a') puts rows on devices\">"}
    output = nbformat.v4.new_output("display_data", data=data)
    assert not list(test_execution.undescribed("99-bad", ran(output)))


def test_two_executions_are_compared():
    one, two = ran(printed("1\n2")), ran(printed("1\n3"))
    assert "cell 1" in first_difference("a", one, two) and "+text: 3" in first_difference("a", one, two)
    assert first_difference("a", one, ran()) and first_difference("a", one, notebook())
    assert first_difference("a", one, ran(printed("1\n2"))) is None
    timed = [ran(printed(seconds), tags=["timing"]) for seconds in "12"]
    assert first_difference("a", *timed) is None


def test_no_namespace_is_a_failure(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Problem, match="could not be made"):
        execute_cut([], tmp_path)


# Running cells: exercises, predictions, planted faults.


def toy(*more):
    return chapter(
        text("# A"),
        code("sizes = (2, 4)", "mesh"),
        code("rows = 16", "other"),
        code("predicted = rows // sizes[0]", "predict"),
        *more,
    )


def only(bad):
    [outcome] = run_jobs([as_jobs(bad.code, id=7)])
    return outcome


def test_cells_run():
    assert only(toy())["failed"] is None
    assert only(toy(code("assert 1 > 2, 'no'")))["error"] == "AssertionError: no"
    assert only(toy(code("import os\nos._exit(3)")))["error"].startswith("CRASH")
    assert "DID NOT RAISE" in only(toy(code("x = 1", "raises-exception")))["error"]
    assert only(toy(code("1 / 0", "raises-exception")))["failed"] is None
    assert "NOT CORRECT" in only(toy(code("'not yet'", "solution-a")))["error"]


def test_cells_time_out():
    [outcome] = run_jobs([as_jobs(toy(code("while True: pass")).code, timeout=1)])
    assert outcome["error"].startswith("TIMEOUT") and outcome["failed"] == 5


def test_jobs_share_nothing():
    first = as_jobs([Cell(1, "code", "import sys\nsys.seen = 1")], id=1)
    second = as_jobs([Cell(1, "code", "import sys\nassert not hasattr(sys, 'seen')")], id=2)
    assert [outcome["error"] for outcome in run_jobs([first, second])] == [None, None]
    own = as_jobs(
        [Cell(1, "code", "import os\nassert 'JAX_PLATFORMS' not in os.environ")], fresh=True
    )
    assert [outcome["error"] for outcome in run_jobs([own])] == [None]


@pytest.mark.parametrize(
    "check, wrong, piece",
    [
        ("return 'correct'", "answer_a = 2", "to the stub"),
        ("return 'not yet'", "answer_a = 2", "to the solution"),
        ("return 'correct' if answer else 'not yet'", "answer_a = 2", "to the wrong answer"),
        (
            "return 'correct' if answer + 0 == 1 else 'not yet'",
            "answer_a = 2",
            "raises for the stub",
        ),
        ("return 'correct' if answer == 1 else 'not yet'", "answer_a = (", "does not run"),
        ("return 'correct' if answer == 1 else 'not yet'", "answer_a = 2", None),
    ],
)
def test_exercises_see(check, wrong, piece):
    bad = chapter(STUB, code(f"def check_a(answer):\n    {check}\nstr(1)", "check-a"), SOLVED)
    job, asked = test_exercises.plan(bad, {"a": {"wrong": wrong}})
    [outcome] = run_jobs([job])
    messages = "\n".join(test_exercises.judge(bad, outcome, asked))
    assert piece in messages if piece else messages == "", messages


def test_unlisted_exercises_are_seen():
    bad = chapter(STUB, CHECK, SOLVED)
    assert list(test_exercises.unlisted([bad], {}))
    assert list(test_exercises.unlisted([bad], {"99-bad": {"a": {"wrong": "answer_a = 1"}}}))
    assert list(test_exercises.unlisted([], {"99-bad": {"a": {}}}))
    assert not list(test_exercises.unlisted([bad], {"99-bad": {"a": {"wrong": "x", "why": "y"}}}))


def test_predictions_see():
    good = toy(code("assert predicted * sizes[0] == 16", "predicted"))
    typed = toy(code("assert predicted == 8", "predicted"))
    shown = toy(
        code("assert sizes == (2, 4)", "fixed-mesh"),
        code("assert predicted * sizes[0] == 16", "predicted"),
    )
    assert not list(test_predictions.failures(good)) and not list(test_predictions.failures(shown))
    assert "(4, 2)" in "\n".join(test_predictions.failures(typed))


def fault(**changes):
    return {
        "chapter": "99-bad",
        "rows": ["A2"],
        "name": "halved",
        "find": "rows = 16",
        "replace": "rows = 8",
        "fails": "assert predicted == 8",
        **changes,
    }


FAULTY = toy(code("shown = predicted"), code("assert predicted == 8"), code("assert rows < 20"))


@pytest.mark.parametrize(
    "changes, word",
    [
        ({}, "killed"),
        ({"replace": "rows = 17"}, "SURVIVED"),
        ({"replace": "rows = 17", "survives": "17 // 2 is 8"}, "survives"),
        ({"survives": "no"}, "NOTICED"),
        ({"fails": "assert rows < 20"}, "ELSEWHERE"),
        ({"replace": "rows = sixteen"}, "BROKEN"),
    ],
)
def test_verdicts(changes, word):
    entry = fault(**changes)
    changed, source, target = faults.fit_to_chapter(entry, FAULTY)
    [outcome] = run_jobs([faults.job(1, FAULTY, changed, source, target.index, 20)])
    assert faults.verdict(entry, target, outcome)[0] == word


@pytest.mark.parametrize(
    "changes, piece",
    [
        ({"find": "rows"}, "times"),
        ({"find": "none"}, "0 times"),
        ({"fails": "none"}, "0 code cells"),
        ({"replace": "rows = 16"}, "the same"),
        ({"replace": "rows = ("}, "not Python"),
        ({"replace": "rows = 8\nrows = 9"}, "one line"),
        ({"fails": "sizes = (2"}, "stands before"),
    ],
)
def test_misfits_are_seen(changes, piece):
    messages = "\n".join(
        test_coverage.misplaced([fault(**changes)], {"99-bad": FAULTY}, {"A2": {}})
    )
    assert piece in messages


def test_misplaced_faults_are_seen():
    messages = "\n".join(
        test_coverage.misplaced(
            [fault(), fault(), fault(name="b", rows=["Z9"]), fault(name="c", chapter="none")],
            {"99-bad": FAULTY},
            {"A2": {}},
        )
    )
    assert "two faults" in messages and "no row Z9" in messages and "no such chapter" in messages


def test_the_command_ends_with_one(monkeypatch, capsys):
    monkeypatch.setattr(faults, "by_name", lambda: {"99-bad": FAULTY})
    for entry, status in ((fault(), 0), (fault(replace="rows = 17"), 1), (fault(find="none"), 1)):
        monkeypatch.setattr(faults, "listed_faults", lambda entry=entry: [entry])
        assert faults.main([]) == status
    assert "To mend" in capsys.readouterr().out
    monkeypatch.setattr(faults, "listed_faults", lambda: [fault(), fault(replace="rows = 17")])
    assert faults.main(["--seconds", "60", "--seed", "3"]) == 1
    assert "seed 3: 2 of 2 faults" in capsys.readouterr().out


def test_a_job_that_does_not_fit_is_not_started():
    jobs = [as_jobs(toy().code, id=cost, cost=cost) for cost in (1, 500, 2)]
    assert [outcome["id"] for outcome in run_jobs(jobs, seconds=60)] == [1, 2]
    assert [outcome["id"] for outcome in run_jobs(jobs)] == [1, 500, 2]


def test_a_sample_without_time_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(faults, "by_name", lambda: {"99-bad": FAULTY})
    monkeypatch.setattr(faults, "listed_faults", lambda: [fault()])
    assert faults.main(["--seconds", "0.1", "--seed", "3"]) == 1
    assert "no fault fits into 0 s" in capsys.readouterr().out


def test_a_stopped_run_leaves_no_process():
    job = as_jobs(toy(code("while True: pass")).code, id="endless", timeout=60)
    quick = as_jobs(toy().code, id="quick")
    results = run_jobs([job, quick], parallel=2)
    assert next(results)["id"] == "quick"
    before = set(children_of_all())
    results.close()
    deadline = time.monotonic() + 10
    while set(children_of_all()) & before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert before and not set(children_of_all()) & before


def children_of_all():
    """Processes that run bookkit/run/cells.py for this test, forks included."""
    mine = subprocess.run(["ps", "-ww", "-eo", "pid,ppid,args"], capture_output=True, text=True).stdout
    table = [line.split(None, 2) for line in mine.splitlines()[1:]]
    servers = {
        pid for pid, parent, words in table if parent == str(os.getpid()) and "run/cells.py" in words
    }
    known = getattr(children_of_all, "known", set()) | servers
    known |= {pid for pid, parent, words in table if parent in known}
    children_of_all.known = known
    return known & {pid for pid, _, words in table if "run/cells.py" in words}


# Coverage.

ROWS = {
    "A2": {"kind": "asserted", "chapters": ["99-bad"], "can": "count"},
    "A1": {"kind": "judgement", "chapters": ["99-bad"], "can": "choose"},
}


@pytest.mark.parametrize(
    "entry, piece",
    [
        ({"id": "A2"}, "names its cells"),
        ({"id": "A2", "cells": ["none"]}, "is in none"),
        ({"id": "A2", "cells": ["rows"]}, "is in"),
        ({"id": "A2", "cells": ["rows = 16"]}, "cannot fail"),
        ({"id": "A2", "cells": ["assert predicted"]}, None),
        ({"id": "A9"}, "no such row"),
        ({"id": "A1"}, "quotes its sentence"),
        ({"id": "A1", "text": "none"}, "0 times"),
        ({"id": "A1", "text": "We choose Auto"}, "source"),
        ({"id": "A1", "text": "We choose Auto", "source": "https://c.d"}, "does not link"),
        ({"id": "A1", "text": "We choose Auto", "source": "https://a.b"}, None),
        ({"id": "A1", "text": "We choose Auto", "source": "rows = 16"}, None),
    ],
)
def test_coverage_sees(entry, piece):
    pages = {"99-bad": "We choose\nAuto, see [a](https://a.b)."}
    found = "\n".join(
        problems_of(
            {"chapter": "99-bad", **entry}, ROWS.get(entry["id"]), {"99-bad": FAULTY}, pages
        )
    )
    assert piece in found if piece else found == "", found


def test_gaps_are_seen():
    assert len(list(gaps([], ROWS, {"99-bad": ""}))) == 2
    assert not list(gaps([], ROWS, {}))
    entry = {"id": "A2", "chapter": "99-bad"}
    assert list(without_faults([entry], ROWS, []))
    assert not list(without_faults([entry], ROWS, [fault()]))


def test_asserting_cells_are_told_apart():
    def can_fail(source, *tags):
        return asserts(Cell(1, "code", source, tags))

    assert can_fail("assert x") and can_fail("x", "raises-exception")
    assert can_fail("ms.assert_no_full_copy(c, t)") and can_fail("raise AssertionError('no')")
    assert not can_fail("print('assert')") and not can_fail("# assert x")


# Names and committed text.


@pytest.mark.parametrize(
    "span",
    [
        "jax.sharding.use_mesh",
        "nnx.Parm",
        "jax.jit_all(f)",
        "make_messh",
        "x.shardin",
        "frobnicate=",
        "P(dta)",
        "jax.jit(f, static_argnms=1)",
    ],
)
def test_unreal_names_are_seen(span):
    messages = list(test_names.unreal(f"Use `{span}`.", "x = 1\nP('data')\nf = 1", {}, "a.md"))
    assert messages and span in messages[0]


@pytest.mark.parametrize(
    "span",
    [
        "jax.jit",
        "nnx.Param",
        "@jax.jit",
        "x",
        "x = 1",
        "P('data')",
        "None",
        "jax.make_mesh(…)",
        "(2, 4)",
        "jax.Array.sharding",
        "donate_argnums=",
        "x.sharding",
        "NamedSharding",
        "pyproject.toml",
        "jax.jit(f, static_argnums=1)",
        "8",
    ],
)
def test_real_names_pass(span):
    assert not list(test_names.unreal(f"Use `{span}`.", "x = 1\nP('data')\nf = 1", {}, "a.md"))


def test_listed_names_are_checked():
    table = {
        "gone": {"jax.jit": "renamed", "use_mesh": "removed", "jax.pmapped": ""},
        "newest-only": {"jax.none": "new"},
        "shell": {"make nothing": "a target"},
        "flag": {"--xla_no_such_flag=1": "?", "JAX_NO_SUCH": "?"},
        "odd": {},
    }
    found = "\n".join(test_names.wrong_entries(table, True, {"site"}))
    for piece in (
        "so it is not gone",
        "whole dotted name",
        "say why",
        "does not import on the newest",
        "no target nothing",
        "does not know xla_no_such_flag",
        "no option of jax.config",
        "[odd] is no kind",
    ):
        assert piece in found, piece
    good = {
        "gone": {"jax.sharding.use_mesh": "removed in 0.9"},
        "shell": {"make site": "builds"},
        "flag": {"--xla_force_host_platform_device_count=8": "XLA", "JAX_NUM_CPU_DEVICES": "env"},
    }
    assert not list(test_names.wrong_entries(good, True, {"site"}))
    assert not list(test_names.unreal("Was `jax.sharding.use_mesh(m)`.", "", good, "a.md"))
    assert list(test_names.unused(good, set()))


@pytest.mark.parametrize(
    "bad", ["TO" + "DO: write", "see /ho" + "me/me/x", "Lorem " + "ipsum", "<<<<<<" + "< HEAD"]
)
def test_unfit_text_is_seen(bad):
    assert "a.md:2" in "\n".join(test_public_text.unfit("a.md", "fine\n" + bad))
