"""Execution: what is executed again, what a failing cell says, and what a kernel sees."""

import os
import re
import shutil
import subprocess
import sys
import time

import nbformat
import psutil
import pytest

from bookkit.model.book import Book, Problem
from bookkit.run import execute
from toy import FRONT, ROOT

HEAD = FRONT + "\n# A claim\n\nProse.\n"


def cell(code, options=""):
    return f"\n```{{code-cell}} ipython3\n{options}\n{code}\n```\n"


@pytest.fixture
def book(tmp_path):
    shutil.copyfile(ROOT / "_config.yml", tmp_path / "_config.yml")
    (tmp_path / "_toc.yml").write_text(
        "format: jb-book\nroot: book/one\nchapters: [file: book/two]\n"
    )
    (tmp_path / "book").mkdir()
    (tmp_path / "book" / "one.md").write_text(HEAD + cell("print('one')"))
    (tmp_path / "book" / "two.md").write_text(HEAD + cell("print('two')"))
    return Book(tmp_path)


@pytest.fixture
def run(capsys):
    """Execute a book: (its notebooks, the pages that it had to run)."""

    def do(book):
        capsys.readouterr()  # what a run that failed had printed
        executed = execute.execute(book)
        return executed, [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]

    return do


def printed(notebooks, page="book/one"):
    return notebooks[page].cells[1].outputs[0].text


def test_only_what_changed_is_executed(book, run):
    first, ran = run(book)
    assert printed(first) == "one\n" and sorted(ran) == ["book/one", "book/two"]
    assert run(book) == (first, [])

    page = book.source("book/one")
    page.write_text(page.read_text().replace("Prose.", "Other prose.\n\nMore."))
    again, ran = run(book)
    assert printed(again) == "one\n" and ran == []

    page.write_text(page.read_text().replace("'one'", "'1'"))
    again, ran = run(book)
    assert printed(again) == "1\n" and ran == ["book/one"]

    page.write_text(page.read_text().replace("ipython3\n", "ipython3\n:tags: [hide-cell]\n"))
    assert run(book)[1] == ["book/one"]  # what a cell is tagged may change how it is run


def test_the_fingerprint_knows_meshscope_and_versions(tmp_path):
    stack = execute.stack()
    assert {"python", "jax", "flax", "meshscope", "normaliser", "BOOK_DEVICES"} <= stack.keys()
    for name in stack:
        assert execute.fingerprint({**stack, name: "another"}) != execute.fingerprint(stack)
    module = tmp_path / "a.py"
    module.write_text("x = 1\n")
    before = execute.hash_of([module])
    module.write_text("x = 2\n")
    assert execute.hash_of([module]) != before


def test_a_failing_cell_names_itself_and_the_other_chapter_is_kept(book, run):
    page = book.source("book/one")
    page.write_text(HEAD + cell("x = 1") + "\nMore prose.\n" + cell("\nx + \\\n  missing"))
    with pytest.raises(Problem) as failed:
        run(book)
    message = str(failed.value)
    lines = page.read_text().splitlines()
    fence = max(number for number, line in enumerate(lines, 1) if line.startswith("```{code-cell"))
    assert message.startswith(f"book/one.md:{fence}: cell 4 failed\n")
    assert "2   missing" in message and "NameError: name 'missing' is" in message
    assert "1 chapter failed; nothing was built." in message
    assert "\x1b" not in message and "/ipykernel_" not in message
    page.write_text(HEAD + cell("x = 1"))
    assert run(book)[1] == ["book/one"]


def test_a_dying_kernel_and_a_slow_cell_are_named(book, run):
    book.source("book/one").write_text(HEAD + cell("import os\nos._exit(3)"))
    book.source("book/two").write_text(HEAD + cell("import time\ntime.sleep(60)"))
    book.config["execute"]["timeout"] = 2
    with pytest.raises(Problem) as failed:
        run(book)
    said = str(failed.value)
    assert re.search(r"book/one\.md:\d+: cell 2 failed\nDeadKernelError: Kernel died", said)
    assert re.search(r"book/two\.md:\d+: cell 2 failed\nCellTimeoutError: .* after 2 seconds", said)


def test_a_kernel_is_this_python_in_an_empty_folder_without_what_the_user_sets_for_jax(
    book, run, monkeypatch
):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    monkeypatch.setenv("BOOK_TEST", "kept")
    code = (
        "import os, sys\n"
        "print(sorted(os.listdir()), sys.executable)\n"
        "print([name for name in os.environ if name.startswith(('XLA_', 'JAX_', 'TF_'))])\n"
        "print(os.environ['BOOK_TEST'])"
    )
    book.source("book/one").write_text(HEAD + cell(code))
    assert printed(run(book)[0]).splitlines() == [
        f"[] {sys.executable}",
        "['JAX_DISABLE_MOST_OPTIMIZATIONS']",
        "kept",
    ]


def test_what_a_killed_run_left_behind_counts_as_missing(book, run):
    run(book)
    for path in (execute.cache_path(book) / "executed").rglob("base.ipynb"):
        path.write_text(path.read_text()[:100])
    assert execute.found_in_cache(book, "book/one") is None
    assert len(run(book)[1]) == 2 and run(book)[1] == []


def test_old_stacks_are_forgotten(book, run):
    new = execute.cache_path(book)
    for age in range(5):
        (new.parent / f"old{age}").mkdir(parents=True)
        os.utime(new.parent / f"old{age}", (age, age))
    run(book)
    kept = sorted(path.name for path in new.parent.iterdir())
    assert kept == sorted(["old4", "old3", new.name])


def test_an_unknown_page_is_an_error():
    with pytest.raises(Problem, match="No chapters: book/99-none"):
        execute.main(["book/99-none"])


def test_a_stopped_command_ends_its_kernels(book, tmp_path):
    marker = tmp_path / "kernel"
    book.source("book/one").write_text(
        HEAD
        + cell(
            f"import os, pathlib, time\npathlib.Path({str(marker)!r}).write_text(str(os.getpid()))\ntime.sleep(300)"
        )
    )
    command = [sys.executable, "-m", "bookkit", "execute", "book/one"]
    running = subprocess.Popen(
        command, cwd=book.root, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while not marker.exists() or not marker.read_text():
        assert running.poll() is None
        time.sleep(0.1)
    running.terminate()
    assert running.wait(30) == 143 and not psutil.pid_exists(int(marker.read_text()))


def test_outputs_as_text_can_be_compared_and_leave_out_what_is_timed(tmp_path):
    new = nbformat.v4
    seen = new.new_output("execute_result", data={"text/plain": "4", "text/html": "<b>4</b>"})
    error = new.new_output("error", ename="E", evalue="no", traceback=["E: no"])
    cells = [
        new.new_markdown_cell("# A"),
        new.new_code_cell("\n2 + 2\n", outputs=[seen]),
        new.new_code_cell("print(1)", outputs=[new.new_output("stream", text="1\n"), error]),
        new.new_code_cell("clock()", metadata={"tags": ["timing"]}, outputs=[seen]),
        new.new_code_cell(""),
    ]
    execute.write_outputs({"book/deeper/01a-x": new.new_notebook(cells=cells)}, tmp_path)
    lines = (tmp_path / "01a-x.txt").read_text().splitlines()
    assert [line for line in lines if line] == [
        *("# cell 2: 2 + 2", "<b>4</b>", "4"),
        *("# cell 3: print(1)", "1", "E: no"),
        "# cell 5: ",
    ]
