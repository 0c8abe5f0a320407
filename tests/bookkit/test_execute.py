"""Execution: what is executed again, what a failing cell says, and what a kernel sees."""

import copy
import os
import shutil
import subprocess
import sys
import time

import nbformat
import psutil
import pytest

from bookkit.model.book import Book, Problem
from bookkit.run import execute
from bookkit.run.execute import (
    ExecutionFailed,
    fingerprint,
    from_cache,
    missing,
    open_cache,
    read_as_sphinx,
)
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
def said():
    return []


def run(book, said, **options):
    said.clear()
    return execute.execute(book, say=said.append, **options)


def test_only_what_changed_is_executed(book, said):
    assert missing(book) == ["book/one", "book/two"]
    first = run(book, said)
    assert first["book/one"].cells[1].outputs[0].text == "one\n" and len(said) == 2
    assert run(book, said) == first and said == []

    page = book.source("book/one")
    page.write_text(page.read_text().replace("Prose.", "Other prose.\n\nMore."))
    assert missing(book) == []
    assert run(book, said)["book/one"].cells[1].outputs == first["book/one"].cells[1].outputs
    assert said == []

    page.write_text(page.read_text().replace("'one'", "'1'"))
    assert missing(book) == ["book/one"]
    assert run(book, said)["book/one"].cells[1].outputs[0].text == "1\n" and len(said) == 1

    with_tag = page.read_text().replace("ipython3\n", "ipython3\n:tags: [hide-input]\n")
    page.write_text(with_tag)
    assert missing(book) == ["book/one"]  # what a cell is tagged may change how it is run


def test_the_fingerprint_knows_meshscope_and_versions(tmp_path):
    stack = execute.stack()
    assert {"python", "jax", "flax", "meshscope", "normaliser", "BOOK_DEVICES"} <= stack.keys()
    for name in stack:
        assert fingerprint({**stack, name: "another"}) != fingerprint()
    module = tmp_path / "a.py"
    module.write_text("x = 1\n")
    before = execute.hash_of([module])
    module.write_text("x = 2\n")
    assert execute.hash_of([module]) != before


def test_a_failing_cell_names_itself_and_the_other_chapter_is_kept(book, said):
    page = book.source("book/one")
    page.write_text(HEAD + cell("x = 1") + "\nMore prose.\n" + cell("\nx + \\\n  missing"))
    with pytest.raises(ExecutionFailed) as failed:
        run(book, said)
    message = str(failed.value)
    lines = page.read_text().splitlines()
    fence = max(number for number, line in enumerate(lines, 1) if line.startswith("```{code-cell"))
    assert (
        f"book/one.md:{fence}: cell 4 failed\n    x + \\\nNameError: name 'missing' is" in message
    )
    assert "1 chapter failed; nothing was built." in message
    assert "\x1b" not in message and "/ipykernel_" not in message
    assert missing(book) == ["book/one"]


def test_a_dying_kernel_and_a_slow_cell_are_named(book, said):
    book.source("book/one").write_text(HEAD + cell("import os\nos._exit(3)"))
    book.source("book/two").write_text(HEAD + cell("import time\ntime.sleep(60)"))
    book.config["execute"]["timeout"] = 2
    with pytest.raises(ExecutionFailed) as failed:
        run(book, said)
    dead, slow = failed.value.failures
    assert (dead.page, dead.cell, slow.page, slow.cell) == ("book/one", 2, "book/two", 2)
    assert "DeadKernelError" in dead.error and slow.error == "TimeoutError: still running after 2 s"


def test_cells_that_are_meant_to_raise(book, said):
    raises = ":tags: [raises-exception]"
    book.source("book/one").write_text(HEAD + cell("1 / 0", raises) + cell("2"))
    assert run(book, said)["book/one"].cells[1].outputs[0].ename == "ZeroDivisionError"
    book.source("book/one").write_text(HEAD + cell("1 / 1", raises))
    with pytest.raises(ExecutionFailed, match="cell 2 failed(.|\n)*Tagged raises-exception"):
        run(book, said)


def test_what_a_cell_writes_to_stderr_is_kept_by_cell(book, said):
    noisy = "import os, sys\nprint('ok')\nprint('oh', file=sys.stderr)\nos.write(2, b'from C\\n')"
    book.source("book/one").write_text(HEAD + cell("1") + cell(noisy))
    _, quiet, loud = run(book, said)["book/one"].cells
    found = "".join(output.text for output in loud.outputs if output.get("name") == "stderr")
    assert "oh" in found
    assert all(output.get("name") != "stderr" for output in quiet.outputs)


def test_a_kernel_is_this_python_in_an_empty_folder_without_what_changes_jax(
    book, said, monkeypatch
):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    monkeypatch.setenv("BOOK_TEST", "kept")
    code = (
        "import os, sys\n"
        "print(sorted(os.listdir()), sys.executable)\n"
        "print([name for name in os.environ if name.startswith(('XLA_', 'JAX_', 'TF_'))])\n"
        "print(os.environ['BOOK_TEST'])"
    )
    book.source("book/one").write_text(HEAD + cell(code))
    shown = run(book, said)["book/one"].cells[1].outputs[0].text.splitlines()
    assert shown == [f"[] {execute.sys.executable}", "[]", "kept"]
    monkeypatch.setenv("BOOK_DEVICES", "real")
    assert execute.kernel_environment(book.root)["XLA_FLAGS"] == os.environ["XLA_FLAGS"]


def test_what_a_killed_run_left_behind_counts_as_missing(book, said):
    run(book, said)
    cache = open_cache(book)
    for path in (cache.path / "executed").rglob("base.ipynb"):
        path.write_text(path.read_text()[:100])
    assert from_cache(cache, read_as_sphinx(book, "book/one")) is None
    run(book, said)
    assert len(said) == 2 and missing(book) == []


def test_fresh_executions_leave_the_cache_alone(book, said):
    run(book, said, pages=["book/one"], fresh=True)
    assert missing(book) == ["book/one", "book/two"]


def test_old_stacks_are_forgotten(book, said):
    caches = execute.cache_path(book).parent
    for age in range(5):
        (caches / f"old{age}").mkdir(parents=True)
        os.utime(caches / f"old{age}", (age, age))
    run(book, said)
    kept = sorted(path.name for path in caches.iterdir())
    assert kept == sorted(["old4", "old3", execute.fingerprint()])


def test_an_unknown_page_is_an_error():
    with pytest.raises(Problem, match="No chapters: book/99-none"):
        execute.main(["book/99-none"])


def test_notebooks_that_sphinx_reads_have_the_same_key(book):
    """The pair that jupytext writes, which pytest --nbmake runs, has the same code."""
    import jupytext

    cache = open_cache(book)
    pair = jupytext.reads(book.source("book/one").read_text(), fmt="md:myst")
    _, key = cache.create_hashed_notebook(read_as_sphinx(book, "book/one"))
    assert cache.create_hashed_notebook(nbformat.from_dict(copy.deepcopy(pair)))[1] == key


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


def test_a_second_process_waits_for_the_first(book, said):
    with execute.alone(book, said.append):
        code = (
            "import sys; from bookkit.run import execute; from bookkit.model.book import Book\n"
            "with execute.alone(Book(), lambda text: print(text, flush=True)): print('mine', flush=True)"
        )
        other = subprocess.Popen(
            [sys.executable, "-c", code], cwd=book.root, stdout=subprocess.PIPE, text=True
        )
        assert other.stdout.readline() == "waiting for another process that executes chapters\n"
    assert other.communicate(timeout=60)[0] == "mine\n" and said == []


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
